"""``gqaconvert families``, and the README's table."""

import json
from pathlib import Path

import pytest
import transformers
from jsonschema import Draft202012Validator

from gqaconvert.catalogue import BEGIN, END, TRANSFORMERS, catalogue, markdown
from gqaconvert.families import Family, all_families
from tests.families.cases import CASES
from tests.families.test_multimodal import CASES as WRAPPERS
from tests.families.test_shipped import CASES as SHIPPED
from tests.support.runs import fails, invoke
from tests.test_schemas import schema

README = Path(__file__).parents[2] / "README.md"


def test_json_is_what_its_schema_says() -> None:
    document = json.loads(invoke("families", "--json").stdout)
    Draft202012Validator.check_schema(schema("families-1"))
    Draft202012Validator(schema("families-1")).validate(document)
    by_name = {family["name"]: family for family in document["families"]}
    assert by_name["llama"]["loads_in"] == "stock"
    assert by_name["t5"]["loads_in"] == "shipped code"
    assert by_name["t5"]["cross_attention"]
    assert by_name["gpt2"]["loads_in"] == "stock or shipped code"
    assert by_name["diffllama"]["loads_in"] == "refused"
    refused = {entry["model_type"] for entry in document["refused"]}
    assert {"deepseek_v3", "mamba"} <= refused


def test_the_table_for_people() -> None:
    shown = invoke("families").stdout
    for facts in catalogue():
        assert facts.name in shown
    one = " ".join(invoke("families", "qwen3_next").stdout.split())
    assert "gates" in one
    assert "subspace" not in one.split("methods")[1].split("limits")[0]
    assert "closest: llama" in fails(2, "families", "lama")
    assert "latent attention" in fails(2, "families", "deepseek_v3")


def test_the_readme_has_the_table() -> None:
    """Repair: python -m gqaconvert.catalogue README.md"""
    text = README.read_text()
    assert text.split(BEGIN)[1].split(END)[0].strip() == markdown().strip()


def test_every_family_that_is_said_to_be_tested_has_a_case() -> None:
    """By the model_type that the cases' real config classes have."""
    tested = {case.model_type for case in CASES} | {case.model_type for case in SHIPPED}
    tested |= {case.name for case in WRAPPERS} & {"mllama"}  # its decoder has no checkpoint of its own
    missing = [
        facts.name
        for facts in catalogue()
        if facts.tested_with and facts.loads_in != "refused" and not tested & {facts.name, *facts.model_types}
    ]
    assert missing == []


def test_the_version_is_the_one_that_is_installed() -> None:
    assert transformers.__version__.startswith(f"{TRANSFORMERS}.")


@pytest.mark.parametrize("family", all_families(), ids=lambda family: family.name)
def test_every_family_has_facts(family: Family) -> None:
    (facts,) = (facts for facts in catalogue() if facts.name == family.name)
    assert facts.kv_heads == "none" or facts.methods
