"""scripts/check_text.py: each rule, the pairs of CONTRIBUTING.md's standard, and what counts as prose."""

from __future__ import annotations

from pathlib import Path

import check_text
import pytest
from check_text import RULES, check
from prose import (
    CELL,
    COMMENT,
    COMMIT,
    DOCSTRING,
    DOCUMENT,
    ERROR,
    HELP,
    LOG,
    METRIC,
    TEST,
    Prose,
    cpp,
    markdown,
    masked,
    python,
    read,
    sentences,
    words,
)
from repository import git

EXAMPLES = [
    # rule, kind, text with a violation, text without
    (
        "relative-subject",
        COMMENT,
        "The port is open. Who reaches it can write.",
        "Who can write? Processes that can reach the port.",
    ),
    ("fragment", DOCSTRING, "Of them, those that are ready.", "Engines that are ready, by name."),
    ("fragment", HELP, "Whose engines to start.", "Framework whose engines are started."),
    ("told", COMMENT, "The peer is told at once.", "The agent notifies the peer at once."),
    ("to-be-had", DOCUMENT, "Where no port can be had, it ends.", "If no port is available, it ends."),
    ("come-of", COMMENT, "This shows what became of it.", "This shows its outcome."),
    ("of-no-use", COMMENT, "Its pages are of no use.", "Its pages are discarded."),
    ("the-other", DOCSTRING, "A copy of that of the other.", "A copy of the peer's region."),
    ("says-so", COMMENT, "A warning says so.", "A warning reports the refusal."),
    ("hear", COMMENT, "The router hears of it later.", "The router receives the event later."),
    ("let-go-of", COMMENT, "It lets go of the memory.", "It deregisters the memory."),
    ("nobody", DOCSTRING, "Nobody reads it.", "No worker reads it."),
    ("nobody", LOG, "engine a: somebody sent garbage", "engine a: a peer sent a malformed message"),
    ("of-ours", COMMENT, "A thread of its own.", "A separate thread."),
    ("he", COMMENT, "An attacker knows his key.", "An attacker knows its key."),
    ("p-and-d", LOG, "P did not answer", "prefill engine a did not answer"),
    ("p-and-d", COMMIT, "vllm: send D's token", "vllm: send the early first token"),
    ("semicolons", COMMENT, "One waits; two go; three end.", "One waits; two go. Three end."),
    ("ask", ERROR, "the checkpoint asks for 3 ranks", "the checkpoint needs 3 ranks"),
    ("fragment", TEST, "What is pushed is served", "Pushed weights are served"),
    ("nobody", TEST, "Failed reset releases nobody", "Failed reset releases no request"),
    ("ask", TEST, "Only the first rank asks", "Only the first rank requests a prefix"),
    ("name-words", TEST, "Decode is told the token", "Decode receives the token"),
    ("name-words", TEST, "Ps error is the answer", "Prefill error behind llm d is the answer"),
    ("filler", DOCUMENT, "It is easy to start.", "Start it with one command."),
    ("subject-form", COMMIT, "Changed the router", "router: count retries"),
    ("empty-subject", COMMIT, "Lint", "router: sort imports"),
    ("long-sentence", COMMENT, "word " * 31 + ".", "word " * 30 + "."),
    ("long-string", METRIC, "word " * 26 + ".", "word " * 25 + "."),
    ("long-subject", COMMIT, "router: " + "x" * 65, "router: " + "x" * 64),
    ("long-name", TEST, "x" * 76, "x" * 75),
    ("mean", DOCUMENT, "word " * 19 + ".", "word " * 18 + "."),
]


def violations(kind: str, text: str, path: str = "kv_connector/some.py") -> set[str]:
    return {one.rule for one in check([Prose(path, 1, kind, text)])}


@pytest.mark.parametrize(("rule", "kind", "wrong", "right"), EXAMPLES)
def test_rule_finds_the_violation_only(rule: str, kind: str, wrong: str, right: str) -> None:
    assert rule in violations(kind, wrong)
    assert violations(kind, right) - {"p-and-d"} == set()


def test_every_rule_has_an_example() -> None:
    assert {rule.name for rule in RULES} | set(check_text.THRESHOLDS) == {row[0] for row in EXAMPLES}


PAIRS = [
    # kind, before, the rule that finds it (none where no pattern can), after
    (
        DOCUMENT,
        "It costs the overlap",
        None,
        "Serial dispatch loses the overlap: the transfer starts only after prefill ends.",
    ),
    (DOCUMENT, "who does not have it gets nothing", None, "Clients without the key are rejected."),
    (
        DOCUMENT,
        "The client has the token that P sampled, while the last pages go",
        "p-and-d",
        "The first token comes from the prefill engine while the last pages are in flight.",
    ),
    (
        DOCUMENT,
        "Who dies, stops or is cut off costs the requests that it had",
        "relative-subject",
        "If an engine dies or loses its network, only its own requests fail.",
    ),
    (
        DOCUMENT,
        "Who has nothing to do with a fault does not notice it.",
        "relative-subject",
        "A fault affects only the requests that use the failed part.",
    ),
    (
        DOCUMENT,
        "What happened when is noted by who does it, and by nobody else.",
        "nobody",
        "Each component records its own timestamps.",
    ),
    (
        DOCUMENT,
        "Which is the k-th is P's own matter: the last step's hooks say it",
        "p-and-d",
        "The prefill engine takes the layer order from the hook order of its previous step.",
    ),
    (
        DOCSTRING,
        "Where it does.",
        "fragment",
        "FirstTokenScheduler for async scheduling: step N+1 is scheduled before step N's output is known.",
    ),
    (
        DOCSTRING,
        "Of them, those whose prompt has still a token that no step was to compute.",
        "fragment",
        "Live requests whose prompt is not fully scheduled.",
    ),
    (
        DOCSTRING,
        "Of this version: bytes by peer, of which at most what the staging holds is not there yet.",
        "fragment",
        "Bytes posted per peer for this version. At most one staging buffer of them is still in flight.",
    ),
    (
        COMMENT,
        "What two or three engines did not take is no matter of the engine.",
        "of-no-use",
        "If several engines refuse a stream, the cause is the stream. Stop retrying.",
    ),
    (
        LOG,
        "request %s: its grammar does not allow token %d, which P has sampled: it ends",
        "p-and-d",
        "request %s failed: the structured-output grammar rejects token %d sampled by the prefill engine",
    ),
    (
        ERROR,
        "objectives are for engines that register: give an address for that, too",
        None,
        "--ttft-ms and --tbt-ms need engines that register. Set --registration HOST:PORT.",
    ),
    (HELP, "Of the prompt that is priced.", "fragment", "Prompt length for the cost estimate, in tokens."),
    (
        METRIC,
        "Moves, by what came of them",
        "come-of",
        "Stream moves by outcome. Streams that a drain left in place are counted with the reason as outcome.",
    ),
    (
        DOCUMENT,
        "a rank that fails is told of with its own reason by all that hear of it",
        "told",
        "Other ranks now report the failing rank's own error.",
    ),
    (
        DOCUMENT,
        "On several hosts a cluster key belongs to it",
        None,
        "Deployments on several hosts need a cluster key.",
    ),
    (
        DOCUMENT,
        "Upgrade routers before engines, and engines before routers on the way back: a router of before does "
        "not know `load`",
        None,
        "Upgrade routers first. Downgrade engines first. Older routers reject the field `load`.",
    ),
    (
        DOCUMENT,
        "without a threshold one does, with steps of twice the threshold two",
        None,
        "Without a threshold, one such prompt is enough. If a step is twice the threshold, two are enough.",
    ),
    (
        DOCUMENT,
        "open pages cost it nothing that can be told",
        "told",
        "Open status pages had no measurable effect.",
    ),
    (CELL, "Who is told", "relative-subject", "Wake-up target"),
    (
        DOCSTRING,
        "``reserve``: only where no engine that is none does",
        None,
        "reserve: use this engine only if no regular engine is usable.",
    ),
    (LOG, "version %s of the weights is dropped: %s", None, "weights: discarded version %s: %s"),
    (
        ERROR,
        "port 5600 is a control socket's and a control socket's: give one another",
        None,
        "port 5600 is used twice (control sockets of vLLM 8100 and vLLM 8200). Change one control_port.",
    ),
    (HELP, "For all of it.", None, "Total time limit, in seconds."),
    (
        COMMIT,
        "vLLM: preemptions are told before model runner V2 zeroes blocks; the gate, a failed reset and a "
        "token that D waits for",
        "long-subject",
        "vllm: report preemptions before model runner V2 zeroes blocks",
    ),
]


@pytest.mark.parametrize(("kind", "before", "rule", "after"), PAIRS)
def test_pairs_of_the_standard(kind: str, before: str, rule: str | None, after: str) -> None:
    found = violations(kind, before, "README.md")
    assert rule in found if rule else found <= {"mean"}
    assert violations(kind, after, "README.md") == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One ends. Two begins.", ["One ends.", "Two begins."]),
        ("Use e.g. a port, i.e. a number. End.", ["Use e.g. a port, i.e. a number.", "End."]),
        ("It took 0.25 s. vLLM 0.32.1 needs 2.5 GB.", ["It took 0.25 s.", "vLLM 0.32.1 needs 2.5 GB."]),
        ("See settings.py and e.g. Dr. No vs. Bond.", ["See settings.py and e.g. Dr. No vs. Bond."]),
        ("Ports, hosts etc. are listed. Files etc. Then more.", None),
        ("Is it ready? CODE says. (No.) Yes.", ["Is it ready?", "CODE says.", "(No.)", "Yes."]),
        ("First ... second.", ["First ... second."]),
    ],
)
def test_sentences(text: str, expected: list[str] | None) -> None:
    expected = expected or ["Ports, hosts etc. are listed.", "Files etc.", "Then more."]
    assert [sentence for _, sentence in sentences(text)] == expected


def test_words_are_not_punctuation() -> None:
    assert words("a - b, c: 1.5 GB/s (x)") == 6


@pytest.mark.parametrize(
    "text",
    [
        "Set `told of` there.",
        "Read [the page](https://host/is-told-of) now.",
        'The log says "the peer is told of it" once.',
        "See https://host/let-go-of/nobody for more.",
    ],
)
def test_code_links_and_quotations_are_no_prose(text: str) -> None:
    assert violations(DOCUMENT, text, "README.md") == set()


MARKDOWN = """# A title

A paragraph that
is told.

    is told in code

1. An item is told.

   ```
   is told
   ```

    More of it is told.

> is told

| a | is told |
|---|---|

<!-- generated: settings -->
is told
<!-- end -->

Last.
"""


def test_markdown_is_read_by_paragraph() -> None:
    found = [(one.line, one.rule) for one in check(markdown("docs/a.md", MARKDOWN))]
    assert found == [(4, "told"), (8, "told"), (14, "told"), (18, "told")]


PYTHON = '''"""Who calls it.

    is told
"""
# It is told
# is told twice.
x = "# is told"  # type: ignore[misc]  # It is told.


class A:
    y: int
    """Of A."""

    def f(self) -> None:
        logger.info("engine %s is told", x)
        raise ValueError(f"{x} is told" if x else "P is gone")


Counter("name", "Is told.")
option(help="What is " "told.")
GAUGES = {"key": "is told"}
'''


def test_python_is_read_by_kind() -> None:
    found = [(one.line, one.rule) for one in check(python("kv_connector/a.py", PYTHON))]
    assert sorted(set(found)) == [
        (1, "fragment"),
        (1, "relative-subject"),
        (5, "told"),
        (6, "told"),
        (7, "told"),
        (12, "fragment"),
        (15, "told"),
        (16, "p-and-d"),
        (16, "told"),
        (20, "fragment"),
        (20, "told"),
        (21, "told"),
    ]


def test_strings_of_tests_are_not_read() -> None:
    assert {one.line for one in check(python("tests/a.py", PYTHON))} == {1, 5, 6, 7, 12}


def test_names_of_tests_are_read() -> None:
    functions = "    async def test_who_joins() -> None: ...\n    def helper_told() -> None: ...\n"
    found = check(python("tests/a.py", f"class TestA:\n{functions}"))
    assert {(one.line, one.rule) for one in found} == {
        (2, "fragment"),
        (2, "name-words"),
        (2, "relative-subject"),
    }


CPP = """// It is told
// by a thread. Of it.
int a = 1'000'000;  // is told
const char* b = "// is told";
/* A block.
 * It is told.
 */
// kOffer    is told
"""


def test_cpp_comments_are_read() -> None:
    found = [(one.line, one.rule) for one in check(cpp("native/a.h", CPP))]
    assert found == [(1, "told"), (3, "told"), (6, "told")]


def test_line_of_a_violation_is_that_of_its_text() -> None:
    prose = Prose("a.py", 10, DOCSTRING, 'One "quote\nof two lines" and\nit is told.')
    assert masked(prose).count("\n") == 2
    assert [one.line for one in check([prose])] == [12]


def test_paths_outside_the_project_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file"):
        check_text.main([str(check_text.ROOT / "docs/nosuch.md")])
    with pytest.raises(SystemExit, match="is not in"):
        check_text.main([str(tmp_path)])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"caf\xe9")
    with pytest.raises(SystemExit, match=r"^a\.md: 'utf-8' codec"):
        read(tmp_path, "a.md")
    (tmp_path / "b.py").write_bytes(b"x = 'a\0b'")
    with pytest.raises(SystemExit, match=r"^b\.py:1: "):
        read(tmp_path, "b.py")
    (tmp_path / "c.py").write_bytes(b"\xef\xbb\xbf# A mark of the byte order before it.\n")
    assert [one.text for one in read(tmp_path, "c.py")] == ["A mark of the byte order before it."]


def test_subjects_are_those_that_no_main_has(tmp_path: Path) -> None:
    """A checkout for CI has origin/main and no branch main."""

    git(tmp_path, "init", "-b", "side")
    git(tmp_path, "commit", "--allow-empty", "-m", "a: begin")
    assert list(check_text.subjects(None, tmp_path)) == []
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(tmp_path, "commit", "--allow-empty", "-m", "b: go on")
    assert [one.text for one in check_text.subjects(None, tmp_path)] == ["b: go on"]
    git(tmp_path, "branch", "main")
    assert list(check_text.subjects(None, tmp_path)) == []
    assert [one.text for one in check_text.subjects("origin/main", tmp_path)] == ["b: go on"]
    with pytest.raises(SystemExit, match="--base nosuch"):
        list(check_text.subjects("nosuch", tmp_path))
