from itertools import permutations

import pytest
import torch

from gqaconvert.merge.grouping import group_by_mergeability
from gqaconvert.merge.heads import Rotary, permute_heads
from gqaconvert.merge.subspace import merge_subspace
from tests.merge.attention import attention
from tests.merge.cases import SCHEMES, Shape, planted, random_heads, random_inputs, random_moment


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("kv", "target"), [(8, 4), (8, 2), (6, 2), (16, 4)])
def test_scattered_copies_are_found_and_merge_without_loss(name: str, kv: int, target: int) -> None:
    shape, rotary = Shape(queries=kv, kv=kv), SCHEMES[name]
    scattered = torch.randperm(kv, generator=torch.Generator().manual_seed(kv)).tolist()
    heads = permute_heads(planted(shape, rotary, target), scattered)
    order = group_by_mergeability(heads, target, rotary=rotary, moment=random_moment(shape))
    size = kv // target
    kinds = [scattered[head] // size for head in order]
    assert [len(set(kinds[start : start + size])) for start in range(0, kv, size)] == [1] * target
    merged = merge_subspace(permute_heads(heads, order), target, rotary=rotary).heads
    inputs = random_inputs(shape, tokens=3)
    torch.testing.assert_close(
        attention(merged, inputs, rotary), attention(heads, inputs, rotary), atol=1e-5, rtol=1e-5
    )


def test_small_layers_get_the_best_partition_of_exchanges() -> None:
    """No exchange of two heads lowers what the merge loses, in shares of K's and V's energy."""
    shape, rotary = Shape(queries=6, kv=6), Rotary(8)
    heads = random_heads(shape)
    order = group_by_mergeability(heads, 3, rotary=rotary)

    def lost(candidate: list[int]) -> float:
        moved = permute_heads(heads, candidate)
        result = merge_subspace(moved, 3, rotary=rotary)
        key = [_energy(moved.query[p : p + 2], moved.key[p : p + 2], True) for p in (0, 2, 4)]
        value = [_energy(moved.output[p : p + 2], moved.value[p : p + 2], False) for p in (0, 2, 4)]
        shares = [
            sum(whole * (1 - float(kept)) for whole, kept in zip(wholes, explained, strict=True)) / sum(wholes)
            for wholes, explained in ((key, result.key_explained), (value, result.value_explained))
        ]
        return sum(shares)

    costs = {tuple(candidate): lost(list(candidate)) for candidate in permutations(range(6)) if _ascending(candidate)}
    assert tuple(order) in costs
    assert costs[tuple(order)] <= costs[0, 1, 2, 3, 4, 5]
    for one in range(6):
        for other in range(6):
            changed = list(order)
            changed[one], changed[other] = changed[other], changed[one]
            groups = sorted(sorted(changed[p : p + 2]) for p in (0, 2, 4))
            assert costs[tuple(order)] <= costs[tuple(head for group in groups for head in group)] + 1e-9


def _ascending(order: tuple[int, ...]) -> bool:
    groups = [order[p : p + 2] for p in (0, 2, 4)]
    return all(a < b for a, b in groups) and groups == sorted(groups)


def _energy(readers: torch.Tensor, heads: torch.Tensor, rotated: bool) -> float:
    total = 0.0
    for reader, head in zip(readers, heads, strict=True):
        if not rotated:
            total += float((reader.T @ head).square().sum())
            continue
        for a in range(4):
            total += float(reader[[a, a + 4]].square().sum() * head[[a, a + 4]].square().sum()) / 2
    return total


@pytest.mark.parametrize("target", [1, 4])
def test_nothing_to_choose_keeps_the_order(target: int) -> None:
    assert group_by_mergeability(random_heads(Shape(kv=4)), target, rotary=Rotary(8)) == [0, 1, 2, 3]


def test_the_count_must_divide() -> None:
    with pytest.raises(ValueError, match="must divide"):
        group_by_mergeability(random_heads(Shape()), 3, rotary=Rotary(8))
