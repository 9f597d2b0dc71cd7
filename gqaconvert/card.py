"""The model card of a converted checkpoint: README.md with the Hub's front matter."""

from typing import Any

from gqaconvert import __version__
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.merge import SITE_METHODS
from gqaconvert.planning import ConversionPlan, cache_bytes_per_token
from gqaconvert.sidecars import CARD, SOURCE_CARD
from gqaconvert.units import format_size

_KEPT_FIELDS = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag", "tags")


def model_card(plan: ConversionPlan, source_card: str) -> str:
    """README.md for the output; licence, languages and tags come from the source's card."""
    from huggingface_hub import ModelCardData

    files, source, target = plan.checkpoint.files, plan.source_geometry, plan.target_geometry
    repo_id = getattr(files, "repo_id", None)
    fields = {key: value for key, value in front_matter(source_card).items() if key in _KEPT_FIELDS}
    tags = fields.get("tags")
    fields["tags"] = [*(tags if isinstance(tags, list) else []), "gqaconvert"]
    fields.setdefault("library_name", "transformers")
    if repo_id:
        fields = {"base_model": repo_id, **fields}
    cache = cache_bytes_per_token(plan)
    kind = "multi-query" if target.num_key_value_heads == 1 else "grouped-query"
    if target.num_key_value_heads == source.num_attention_heads:
        kind = "multi-head"
    name = repo_id or plan.checkpoint.files.label.rstrip("/").rpartition("/")[2]
    rows = [
        ("KV heads", str(source.num_key_value_heads), str(target.num_key_value_heads)),
        ("query heads per KV head", str(source.queries_per_kv), str(target.queries_per_kv)),
        ("weights", format_size(plan.checkpoint.index.total_size), format_size(plan.total_size)),
        ("KV cache per token", format_size(cache["source"]), format_size(cache["target"])),
    ]
    lines = [
        "---", ModelCardData(**fields).to_yaml(), "---",
        "",
        f"# {name}, {kind} attention with {target.num_key_value_heads} KV heads",
        "",
        f"Made by gqaconvert {__version__} from `{name}`"
        + (f" (revision `{files.revision}`)" if files.revision else "") + ".",
        "",
        "| | source | this model |\n|---|---|---|\n" + "\n".join(f"| {a} | {b} | {c} |" for a, b, c in rows),
        "",
        *_explanation(plan),
        "",
        *([f"Note: {caution}.", ""] if (caution := plan.family.caution_for(plan.checkpoint.config.text)) else []),
        "The recipe and the files' hashes are in `gqaconvert.json`."
        + (f" The source's own card is `{SOURCE_CARD}`." if source_card else ""),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _explanation(plan: ConversionPlan) -> list[str]:
    recipe, target = plan.recipe, plan.target_geometry
    if target.num_key_value_heads > plan.source_geometry.num_key_value_heads:
        return ["Every KV head of the source was repeated: this model computes exactly what the source computes."]
    if recipe.method in SITE_METHODS:
        return _site_explanation(plan)
    how = {
        "mean": "the mean of the group's heads",
        "first": "the first head of the group",
        "random": f"freshly initialised (seed {recipe.seed})",
    }.get(recipe.method, "")
    return [
        f"Query head `h` reads KV head `h // {target.queries_per_kv}`. The key and value projections of each group of",
        f"consecutive heads were merged (method `{recipe.method}`: {how}); other weights are those of the source.",
        "",
        "**Before uptraining, expect much worse text than the source's.** Ainslie et al. (EMNLP 2023,",
        "[arXiv:2305.13245](https://arxiv.org/abs/2305.13245)) continue pre-training for 5% of the original steps",
        "after such a conversion to regain most of the quality.",
    ]


def _site_explanation(plan: ConversionPlan) -> list[str]:
    recipe = plan.recipe
    lines = [
        f"Query head `h` reads KV head `h // {plan.target_geometry.queries_per_kv}`. The heads of each group were",
        f"merged by the method `{recipe.method}` ({SITE_METHODS[recipe.method]}); the query, key, value and output",
        "projections are new, all other weights are those of the source.",
    ]
    if recipe.grouping != "adjacent":
        lines.append("Heads were reordered so that those that merge well share a KV head.")
    if recipe.calibration:
        lines.append(f"Fitted on at most {recipe.calibration.tokens:,} tokens of calibration text.")
    if recipe.refine:
        lines.append(f"Each layer was then refined against the source's ({recipe.refine} steps).")
    if recipe.joint:
        lines.append(f"All layers were then refined together against the source's predictions ({recipe.joint} steps).")
    lines += [f"Note: {limit}." for limit in sorted({limit for work in plan.work for limit in work.freedom.limits})]
    return [*lines, "", "The text is worse than the source's; `gqaconvert validate` measures by how much."]


def source_card(folder: LocalFolder) -> str:
    """The card of a checkpoint's source, where it is kept; else its own; empty where it has none."""
    name = SOURCE_CARD if SOURCE_CARD in folder.sizes else CARD
    return folder.read_bytes(name).decode("utf-8", "replace") if name in folder.sizes else ""


def front_matter(card: str) -> dict[str, Any]:
    """The YAML fields at the top of a model card; empty where there are none or they are not readable."""
    if not card.startswith("---"):
        return {}
    from huggingface_hub import RepoCard

    try:
        return dict(vars(RepoCard(card, ignore_metadata_errors=True).data))
    except Exception:  # a hostile card must not stop a conversion; the YAML parser raises many kinds
        return {}
