# SPDX-License-Identifier: BSD-3-Clause
"""docs/start/troubleshooting.md: each message that it quotes is one that the sources can print."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "start" / "troubleshooting.md"
# The share of the letters of a message that its source has: the others are formatted in.
MIN_SHARE = 0.4
ANY = "\0"


def _parts(node):
    """A string expression of Python with ANY for each part that is formatted in; None for any other
    expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(ANY if isinstance(v, ast.FormattedValue) else v.value for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_parts(node.left), _parts(node.right)]
        return "".join(ANY if side is None else side for side in sides)
    return None


def _python_texts():
    for path in (ROOT / "python").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        whole = (ast.JoinedStr, ast.BinOp)
        parts = {
            id(child) for node in nodes if isinstance(node, whole) for child in ast.iter_child_nodes(node)
        }
        texts = (_parts(node) for node in nodes if id(node) not in parts)
        yield from (text.replace("%s", ANY) for text in texts if text is not None)


def _cpp_texts():
    for path in [p for suffix in ("cpp", "cuh", "h", "cu") for p in (ROOT / "csrc").rglob(f"*.{suffix}")]:
        for literals in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', path.read_text()):
            yield re.sub(r'"\s*"', "", literals).strip().strip('"').replace("%s", ANY).replace("\\n", "")


@pytest.fixture(scope="module")
def sources():
    """(number of letters, constant parts) of every text."""
    texts = {text for source in (_python_texts, _cpp_texts) for text in source()}
    return [(letters(text), text.split(ANY)) for text in texts]


def letters(text):
    return len(re.findall(r"[A-Za-z]", text))


def messages():
    for block in re.findall(r"^ *```text\n(.*?)^ *```", PAGE.read_text(), re.M | re.S):
        yield from map(str.strip, block.splitlines())


def is_in(message, sources):
    """Whether a source has this message. A "..." in it stands for text that the source formats in."""
    least = MIN_SHARE * letters(message)
    return any(
        count >= least
        and all(part in message for part in parts)
        and re.search(".*".join(map(re.escape, parts)), message, re.S)
        for count, parts in sources
    )


@pytest.mark.parametrize("message", messages())
def test_a_quoted_message_is_in_the_sources(message, sources):
    assert is_in(message, sources), "no source has this message any more"


def test_another_text_is_not(sources):
    assert not is_in("liger.patch: nothing in Net was ever printed like this", sources)
    assert not is_in("liger.patch: nothing in Net can be painted as asked; looked for ...", sources)


def test_the_page_quotes_messages():
    assert len(list(messages())) >= 20
