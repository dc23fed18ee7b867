"""The Python programs of the guide: each compiles, and those that can run alone run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEADLINE_SECONDS

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide"

# By page and heading.
RUN = {
    ("start.md", "Python"),
    ("training.md", "TorchDistributor without Spark"),
    ("training.md", "Reports and checkpoints"),
    ("coming-from.md", "From TorchDistributor"),
}
NOT_RUN = {
    ("coming-from.md", "From Ray's tasks and actors"),  # it is Ray's
    ("training.md", "TorchTrainer: programs for Ray Train"),  # a part; `examples/torch_trainer.py` is whole, and is run
}
# Their programs have tests of their own.
TESTED_ELSEWHERE = {"data.md", "estimators.md", "tune.md"}


def blocks():
    """Each block of Python in the guide: page, heading, number of its first line, and text."""
    found = []
    for page in sorted(GUIDE.glob("*.md")):
        heading, language, first, lines = "", None, 0, []
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fence = re.match(r"\s*```(.*)", line)
            if fence and language is None:
                language, first, lines = fence[1].strip(), number + 1, []
            elif fence:
                if language.split(",")[0] == "python":
                    found.append((page.name, heading, first, "\n".join(lines) + "\n"))
                language = None
            elif language is not None:
                lines.append(line)
            elif line.startswith("#"):
                heading = line.lstrip("#").strip()
    return found


def named(block):
    page, heading, first, _ = block
    return f"{page}:{first}"


def test_the_guide_has_programs():
    assert len(blocks()) >= len(RUN | NOT_RUN)


@pytest.mark.parametrize("block", blocks(), ids=named)
def test_a_program_compiles(block):
    page, _, first, text = block
    compile("\n" * (first - 1) + text, str(GUIDE / page), "exec")


def test_each_program_is_run_or_is_known_not_to_be():
    there = {(page, heading) for page, heading, _, _ in blocks() if page not in TESTED_ELSEWHERE}
    assert there == RUN | NOT_RUN


@pytest.mark.parametrize("block", [block for block in blocks() if block[:2] in RUN], ids=named)
def test_a_program_runs_alone(block, environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(block[3], encoding="utf-8")
    # What it stores is not left in the user's folders.
    env = {**environment, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    # What a program says of its output is what it prints.
    said = re.search(r"print\(.*\)\s+# (\S+)$", block[3], re.MULTILINE)
    assert said is None or said[1] in done.stdout.split()
