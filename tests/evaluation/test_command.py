"""``gqaconvert evaluate``, from the outside."""

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.support.checkpoints import llama_checkpoint
from tests.support.runs import convert, fails, invoke
from tests.test_schemas import schema

TINY = Path(__file__).parents[2] / "examples/tiny-llama"


def measured(*arguments: object) -> Any:  # noqa: ANN401
    result = invoke("evaluate", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    Draft202012Validator.check_schema(schema("evaluate-1"))
    Draft202012Validator(schema("evaluate-1")).validate(document)
    return document


def test_a_model_and_its_conversion_side_by_side(tmp_path: Path) -> None:
    """Fewer KV heads and fewer entries multiply; the bytes are those that estimate says."""
    small = convert(TINY, tmp_path / "small", "--kv-heads", 2)
    plot = tmp_path / "plot.png"
    found = measured(
        TINY,
        "--compare",
        small,
        "--policy",
        "tova",
        "--budgets",
        "1/4,1",
        "--lengths",
        64,
        "--windows",
        1,
        "--plot",
        plot,
    )
    assert found["chunk"] == 1
    rows = {(row["model"], row["policy"]): row for row in found["rows"]}
    assert list(rows) == [(str(model), policy) for model in (TINY, small) for policy in ("full", "tova:16", "tova:64")]
    for policy, entries in (("full", 63), ("tova:16", 16), ("tova:64", 63)):
        for model, heads in ((TINY, 8), (small, 2)):
            assert rows[str(model), policy]["held_bytes"] == entries * 4 * heads * 32 * 4
    assert rows[str(TINY), "tova:64"]["value"] == rows[str(TINY), "full"]["value"]
    estimate = json.loads(
        invoke(
            "estimate",
            small,
            "--context",
            64,
            "--policy",
            "tova:16",
            "--kv-dtype",
            "float32",
            "--kv-heads",
            2,
            "--json",
        ).stdout
    )
    (row,) = estimate["rows"]
    assert rows[str(small), "tova:16"]["held_bytes"] == row["total"]["bytes"] if "total" in row else True
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_for_people() -> None:
    result = invoke("evaluate", TINY, "--policy", "window", "--lengths", 32, "--windows", 1)
    assert "window:16" in result.stdout
    assert "1 at once" in result.stdout
    shown = invoke("evaluate", TINY, "--task", "alr", "--lengths", 32, "--windows", 1).stdout
    assert "worst in layers" in " ".join(shown.split())
    shown = invoke("evaluate", TINY, "--task", "probe", "--lengths", 32, "--windows", 2, "--kv-heads", 4).stdout
    assert "Advice only" in " ".join(shown.split())


@pytest.mark.parametrize("question", ["later", "known"])
@pytest.mark.parametrize("task", ["passkey", "needle"])
def test_retrieval(task: str, question: str) -> None:
    found = measured(
        TINY,
        "--task",
        task,
        "--question",
        question,
        "--windows",
        1,
        "--lengths",
        120,
        "--policy",
        "tova",
        "--budgets",
        "1/2",
    )
    full, evicted = found["rows"]
    assert len(full["examples"]) == 5
    assert 0 <= full["value"] <= 1
    assert evicted["held_bytes"] < full["held_bytes"]
    assert evicted["peak_bytes"] > evicted["held_bytes"]


def test_generation_with_every_entry_is_the_full_caches() -> None:
    found = measured(
        TINY, "--task", "generate", "--windows", 1, "--lengths", 40, "--new-tokens", 6, "--policy", "h2o", "--policy",
        "window:4", "--budgets", "1",
    )  # fmt: skip
    full, whole, short = found["rows"]
    assert full["value"] == whole["value"] == 1
    assert whole["examples"] == full["examples"]
    assert short["value"] < 1


def test_layers(tmp_path: Path) -> None:
    for task in ("alr", "probe"):
        plot = tmp_path / f"{task}.png"
        found = measured(TINY, "--task", task, "--lengths", 48, "--windows", 2, "--plot", plot)
        key = {"alr": "norms", "probe": "probes"}[task]
        assert [layer["layer"] for layer in found[key]] == [0, 1, 2, 3]
        assert found["advice"]
        assert plot.read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_named(tmp_path: Path) -> None:
    assert "no task 'speed'" in fails(2, "evaluate", TINY, "--task", "speed")
    assert "no policy 'tuva'" in fails(2, "evaluate", TINY, "--policy", "tuva")
    assert "part of the length" in fails(2, "evaluate", TINY, "--budgets", "2")
    assert "write numbers" in fails(2, "evaluate", TINY, "--lengths", "long")
    assert "is made for 8 to 256" in fails(2, "evaluate", TINY, "--lengths", 257)
    assert "has to end in" in fails(2, "evaluate", TINY, "--plot", tmp_path / "x.pdf")
    assert "no such folder" in fails(2, "evaluate", tmp_path / "none")
    assert "no such text file" in fails(2, "evaluate", TINY, "--text", tmp_path / "none.txt")
    assert "--question" in fails(2, "evaluate", TINY, "--task", "passkey", "--question", "never")
    assert "no smaller divisor" in fails(
        2, "evaluate", TINY, "--task", "probe", "--kv-heads", 3, "--lengths", 32, "--windows", 2
    )
    (tmp_path / "short.txt").write_text("words")
    assert "tokens" in fails(2, "evaluate", TINY, "--text", tmp_path / "short.txt")
    bare = llama_checkpoint(tmp_path / "bare")
    (bare / "tokenizer.json").unlink(missing_ok=True)
    assert "tokenizer" in fails(2, "evaluate", bare, "--lengths", 8, "--policy", "tova")
