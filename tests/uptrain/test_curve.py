"""The picture of a run, looked at by its pixels, and the reading of its metrics."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from gqaconvert.errors import InputError, StorageError
from gqaconvert.uptrain.curve import draw_curve, read_metrics, running_mean, write_curve

BLUE, ORANGE, RED, GREY = (0x2B, 0x6C, 0xB0), (0xDD, 0x6B, 0x20), (0xC5, 0x30, 0x30), (0x4A, 0x55, 0x68)


def pixels(picture: Path, colour: tuple[int, int, int]) -> int:
    image = np.round(imread(picture)[..., :3] * 255).astype(int)
    return int((image == colour).all(-1).sum())


def write_lines(path: Path, records: list[dict[str, object]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path


@pytest.mark.parametrize("steps", [1, 30, 200])
def test_picture(steps: int, tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"step": step, "loss": 4 - step / steps, "lr": 1e-3, "grad_norm": 1.0, "spike": step == steps}
        for step in range(1, steps + 1)
    ]
    plain = write_lines(tmp_path / "plain.jsonl", records)
    write_curve(plain, tmp_path / "plain.png", title="a run")
    assert pixels(tmp_path / "plain.png", BLUE) > 20
    assert pixels(tmp_path / "plain.png", RED) > 20
    assert pixels(tmp_path / "plain.png", ORANGE) == pixels(tmp_path / "plain.png", GREY) == 0
    assert draw_curve(read_metrics(plain), title="a run") == (tmp_path / "plain.png").read_bytes()

    records += [
        {"step": 0, "eval_loss": 4.1},
        {"step": steps, "eval_loss": 3.1},
        {"step": steps, "loss": float("nan"), "spike": True},
    ]
    write_curve(write_lines(tmp_path / "full.jsonl", records), tmp_path / "full.png", title="a run", source_loss=2.5)
    assert pixels(tmp_path / "full.png", ORANGE) > 20
    assert pixels(tmp_path / "full.png", GREY) > 100


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    assert read_metrics(write_lines(tmp_path / "cut.jsonl", records, '{"step": 3, "lo')) == records
    (tmp_path / "broken.jsonl").write_text('{"step": 1}\n[]\n{"step": 2}\n')
    with pytest.raises(InputError, match="line 2"):
        read_metrics(tmp_path / "broken.jsonl")
    with pytest.raises(StorageError, match="cannot read"):
        read_metrics(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no losses"):
        draw_curve([{"step": 1, "lr": 0.1}], title="")
    with pytest.raises(StorageError, match="cannot write"):
        write_curve(tmp_path / "cut.jsonl", tmp_path / "cut.jsonl" / "a.png", title="")


@given(st.lists(st.floats(-1e3, 1e3), max_size=30), st.integers(1, 40))
def test_running_mean(values: list[float], window: int) -> None:
    expected = [np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    assert running_mean(values, window) == pytest.approx(expected, abs=1e-9)


def test_without_matplotlib_the_extra_is_named() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from gqaconvert.uptrain.curve import draw_curve\n"
        "from gqaconvert.errors import MissingExtraError\n"
        "try: draw_curve([{'step': 1, 'loss': 1.0}], title='')\n"
        "except MissingExtraError as error: print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "gqaconvert[plot]" in done.stdout
