"""Inputs that have broken scripts of this kind, byte for byte, and makers of others like them."""
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

UNICODE = ("x\u00b2 \ufb01 \u2460 \uff12.\uff14 \ufe30 \u212b A\u030a e\u0301 \u00e9 "
           "\U0001f642\U0001f3fd\u200d\U0001f680 \u65e5\u672c\u8a9e \u0391\u03b1 \u05e9\u05c1 "
           "\x00\x07\x1b[0m \u2028\u2029 \u00a0end\n")  # compatibility, combining, ZWJ, controls
WHITESPACE = "def f(x):\n\tif x:\n\t    return  x   \n\n\n\n\nclass A:\n    pass \n\r\nend\r\n"
CONTROL_WORDS = ("People write [EOT] and [PAD] and [BOT] and [UNK] in plain text, and mean just "
                 "that.\n")


def lines(*rows: dict) -> bytes:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


# Each is: the file's name, its bytes, the documents in it, what must be said about it.
GOOD = {
    "null_rows": (
        "null_rows.jsonl",
        lines(dict(text=None), dict(text=""), dict(text="   "), dict(text=123),
              dict(other="no text here"), dict(text="The only good row of this file.")),
        ["The only good row of this file."], ["NoneType", "blank", "int"]),
    "surrogate": (
        "surrogate.jsonl",
        b'{"text": "good row one"}\n{"text": "half a pair \\ud800 stands here"}\n'
        b'{"text": "good row two"}\n',
        ["good row one", "half a pair \ufffd stands here", "good row two"],
        ["U+FFFD", "surrogate.jsonl"]),
    "bom_crlf": (
        "bom_crlf.jsonl",
        b'\xef\xbb\xbf{"text": "first row behind a byte order mark"}\r\n\r\n'
        b'{"text": "second row"}\r\n{"text": "third row, no line end"}',
        ["first row behind a byte order mark", "second row", "third row, no line end"], []),
    "control_words": ("control_words.txt", CONTROL_WORDS.encode(), [CONTROL_WORDS], []),
    "latin1": (
        "latin1.txt", "Caf\u00e9, na\u00efve, \u00fcber: eight-bit text.\n".encode("latin-1"),
        ["Caf\ufffd, na\ufffdve, \ufffdber: eight-bit text.\n"], ["U+FFFD", "latin1.txt"]),
    "whitespace": ("whitespace.py", WHITESPACE.encode(), [WHITESPACE], []),
    "unicode": ("unicode.txt", UNICODE.encode(), [UNICODE], []),
    "documents": (
        "documents.jsonl",
        lines(*(dict(text="word " * n) for n in (1, 2, 7, 8, 9, 31, 32, 33, 100, 1000))),
        ["word " * n for n in (1, 2, 7, 8, 9, 31, 32, 33, 100, 1000)], []),
}

# Each is: the file's name, its bytes, what the sentence that stops the script must name.
BAD = {
    "other_column": (
        "other_column.jsonl",
        lines(dict(content="the text stands under another name", id=1),
              dict(content="second row", id=2)),
        ["--text_column", "content", "id"]),
    "utf16": ("utf16.txt", "two bytes a character\n".encode("utf-16"), ["utf16.txt", "UTF-8"]),
    "empty": ("empty.txt", b"", ["empty.txt", "no text"]),
    "blank": ("blank.txt", b" \r\n\t\n", ["blank.txt", "no text"]),
    "no_rows": ("rows.jsonl", b'[{"text": "an array of rows is not JSON lines"}]\n', ["JSON"]),
}


def write(folder: Path, name: str, content: bytes | str) -> Path:
    """Make a file, and the folders that it stands in."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def compress(content: bytes, suffix: str) -> bytes:
    """Compress as a file with this suffix is: '', '.gz' or '.zst'."""
    if not suffix:
        return content
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, {".gz": "gzip", ".zst": "zstd"}[suffix]) as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


def write_parquet(path: Path, columns: dict, **settings) -> Path:
    """Make a parquet file of named columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **settings)
    return path


def damage_column(path: Path, name: str) -> None:
    """Overwrite all data of one column of an uncompressed parquet file."""
    with pq.ParquetFile(path) as file:
        place = file.schema_arrow.names.index(name)
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        chunks = [group.column(place) for group in groups]
    with open(path, "r+b") as file:
        for chunk in chunks:
            file.seek(chunk.data_page_offset)
            file.write(b"\xff" * chunk.total_compressed_size)
