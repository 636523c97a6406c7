"""What the texts promise: commands that the scripts take, files that exist, sizes that are kept."""
import ast
import inspect
import os
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

import train_llama
import train_tokenizer

SCRIPTS = [ROOT / "train_llama.py", ROOT / "train_tokenizer.py"]
README, RESULTS = ROOT / "README.md", ROOT / "tests" / "RESULTS.md"
PAGES = [path for path in (README, RESULTS) if path.exists()]
LANGUAGES = ("bash", "sh", "shell", "console")  # blocks in which every line is a command

FLAGS = {  # how each script reads its flags
    "train_llama.py": ([train_llama.LlamaConfig, train_llama.TrainConfig], train_llama.DEMO),
    "train_tokenizer.py": ([train_tokenizer.TokenizerConfig], train_tokenizer.DEMO),
}
OTHERS = [  # the shapes of all other commands
    r"python3? -m venv [\\\w./-]+",
    r"(source|\.) [\w./-]+/bin/activate",
    r"(python3? -m )?pip install( (-r [\w./-]+|-U|--upgrade|[\w-]+([=<>]=?[\w.]+)?"
    r"|--index-url https://[\w./-]+))+",
    r"(python3? -m )?pytest( (tests(/\w+\.py)?|-[a-z]+))*",
    r"python3? tests/\w+\.py( [\w./-]+)*",
    r"tensorboard --logdir [\w./-]+",
    r"git clone [\w:/.@<>-]+",
    r"cd [\w./-]+",
    r"nvidia-smi",
    r"python3? -c '.*convert_hf_to_gguf.*' [\w./-]+( --(outfile|outtype) [\w./-]+)+",
    r"(python3? )?convert[-_]hf[-_]to[-_]gguf(\.py)? [\w./-]+( --(outfile|outtype) [\w./-]+)+",
    r"llama-(cli|completion|server) -m [\w./-]+( -{1,2}[\w-]+( '[^']*'| [\w./-]+)?)*",
]


def logical_lines(text: str) -> list[str]:
    """Lines, those that end in a backslash joined to the next."""
    return re.sub(r" *\\\n\s*", " ", text).splitlines()


def commands_of(page: str) -> list[str]:
    """All commands in a Markdown text: of blocks, and of code in a sentence."""
    found = []
    for language, block in re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", page, re.M | re.S):
        for line in logical_lines(block):
            line = re.sub(r"^[$>] ", "", line.strip())
            if language in LANGUAGES and line and not line.startswith("#") or is_call(line):
                found.append(line)
    prose = re.sub(r"^ *```.*?^ *```", "", page, flags=re.M | re.S)
    return found + [code for code in re.findall(r"`([^`\n]+)`", prose) if is_call(code)]


def is_call(line: str) -> bool:
    """Whether a line calls one of the scripts, or installs or tests something."""
    return bool(re.match(r"(\w+=\S+ )*(python3?|torchrun|pip|pytest) \S", line))


def check(command: str) -> None:
    """Fail if a command, or a part of a chain, is not one that works."""
    parts, part = [], []
    for word in shlex.split(command, comments=True):
        if word in ("&&", ";"):
            parts, part = [*parts, part], []
        else:
            part.append(word)
    for words in [*parts, part]:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable for this command
            words = words[1:]
        scripts = [word for word in words if word in FLAGS]
        if not scripts:
            line = " ".join(f"'{word}'" if re.search(r"\s", word) else word for word in words)
            if words[1:2] == ["-c"]:
                ast.parse(words[2])
            assert any(re.fullmatch(shape, line) for shape in OTHERS), f"unknown command: {line}"
            continue
        at = words.index(scripts[0])
        launcher = " ".join(words[:at])
        assert re.fullmatch(r"python3?|torchrun( --standalone| --[\w-]+[= ]\S+)*", launcher)
        configs, demo = FLAGS[scripts[0]]
        flags = [word for word in words[at + 1:] if word != "--help"]
        train_llama.parse_flags(flags, configs, demo)  # SystemExit says what is wrong


def docstring_commands(script: Path) -> list[str]:
    """The indented lines of a script's docstring that call something."""
    text = ast.get_docstring(ast.parse(script.read_text()), clean=False)
    return [line.strip() for line in logical_lines(text) if is_call(line.strip())]


# ---- commands ----

def test_there_is_a_readme_with_commands():
    assert commands_of(README.read_text())


def test_every_command_on_a_page_is_understood():
    for page in PAGES:
        for command in commands_of(page.read_text()):
            check(command)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_command_in_a_docstring_is_understood(script):
    commands = docstring_commands(script)
    assert commands
    for command in commands:
        check(command)


@pytest.mark.parametrize("command", [
    "python train_llama.py --demo && python train_llama.py --no_such_flag 1",
    "python train_llama.py --seq_len long", "python train_tokenizer.py --seq_len 8",
    "torchrun 2 train_llama.py", "rm -rf out", "python -m venv .venv && rm -rf out",
    "sudo python train_llama.py"])
def test_a_command_that_does_not_work_is_noticed(command):
    with pytest.raises((SystemExit, AssertionError)):
        check(command)


def test_commands_are_found_in_blocks_chains_and_sentences():
    page = ("Text `python train_llama.py --demo` and `--flag`, `python`.\n\n```bash\n"
            "# a comment\npython -m venv .venv\npython train_llama.py \\\n    --seed 2  # note\n"
            "```\n\n```\nstep 1: output\npip install x\n```\n")
    assert commands_of(page) == [
        "python -m venv .venv", "python train_llama.py --seed 2  # note", "pip install x",
        "python train_llama.py --demo"]


def test_python_on_a_page_compiles():
    for page in PAGES:
        for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.M | re.S):
            ast.parse(inspect.cleandoc(block))


# ---- files ----

def test_every_file_that_a_page_names_exists():
    """Links to files, and the repository's own: its scripts, tests and pages."""
    own = r"(?<![\w/.-])((?:tests/|\.ci/)[\w./-]*\w|[\w-]+\.py|LICENSE|requirements\.txt)"
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"\w+:|#", link):
                assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
        for name in set(re.findall(own, text)) - {"convert_hf_to_gguf.py"}:  # llama.cpp's
            there = (ROOT / name).exists() or (ROOT / "tests" / name).exists()
            assert there, f"{page.name}: {name}"


def test_every_flag_that_a_page_names_in_a_sentence_exists():
    flags = {flag for configs, _ in FLAGS.values() for config in configs
             for flag in config.__dataclass_fields__}
    flags |= {f"no_{flag}" for flag in flags} | {"demo", "help"}
    others = {"outfile", "outtype", "logdir", "nproc_per_node", "nnodes", "node_rank"}
    for script in (ROOT / "tests").glob("*.py"):  # those that measure have flags of their own
        others |= set(re.findall(r'add_argument\("--(\w+)"', script.read_text()))
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        named = {name.replace("-", "_") for name in re.findall(r"`--([\w-]+)[^`\n]*`", prose)}
        assert named <= flags | others, page.name


def test_ci_runs_the_test_command_of_the_readme():
    run, text = ROOT / ".ci" / "run", README.read_text()
    assert os.access(run, os.X_OK)
    commands = [re.search(r"pytest.*", part)[0].strip() for command in commands_of(text)
                for part in command.partition("#")[0].split("&&") if "pytest" in part]
    assert commands
    assert commands[0] in run.read_text()


# ---- sizes ----

@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_line_is_longer_than_100_columns(script):
    lines = script.read_text().splitlines()
    assert [f"{i}: {line}" for i, line in enumerate(lines, 1) if len(line) > 100] == []


@pytest.mark.parametrize("script, limit", [("train_llama.py", 1115), ("train_tokenizer.py", 150)])
def test_a_script_is_no_longer_than_it_may_be(script, limit):
    lines = (ROOT / script).read_text().count("\n")
    assert lines <= limit


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_function_fits_on_a_screen(script):
    """45 lines, and 95 for the training loop."""
    lengths = {node.name: node.end_lineno - node.lineno + 1
               for node in ast.walk(ast.parse(script.read_text()))
               if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert {name: n for name, n in lengths.items() if n > (95 if name == "train" else 45)} == {}
