"""Stream a checkpoint's floating tensors and count what is not finite."""

from gqaconvert.checkpoint.dtypes import BITS, TORCH_NAMES
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import CheckpointIndex, Problem
from gqaconvert.checkpoint.writer import Advance

_CHUNK = 16 * 2**20


def find_non_finite(
    index: CheckpointIndex, folder: LocalFolder, on_progress: Advance = lambda nbytes: None
) -> tuple[Problem, ...]:
    """One problem for each tensor with NaN or infinite values; types that torch cannot test are passed over."""
    import torch

    from gqaconvert.merge.execute import torch_dtype

    problems = []
    for shard in index.shards:
        with folder.path(shard.shard).open("rb") as file:
            for entry in shard.entries:
                if entry.dtype not in TORCH_NAMES:
                    on_progress(entry.nbytes)
                    continue
                file.seek(entry.start)
                bad, rest = 0, entry.nbytes
                while rest:
                    data = bytearray(file.read(min(_CHUNK, rest)))
                    if not data:
                        break
                    values = torch.frombuffer(data, dtype=torch_dtype(entry.dtype))
                    bad += int(values.numel() - torch.isfinite(values).sum())
                    rest -= len(data)
                    on_progress(len(data))
                if bad:
                    share = f"{bad:,} of {entry.nbytes * 8 // BITS[entry.dtype]:,} values are NaN or infinite"
                    problems.append(Problem("error", "not-finite", entry.name, share))
    return tuple(problems)
