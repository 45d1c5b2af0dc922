"""Header fields as UniProt, UniRef and NCBI write them, and groups that add up."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import groups, perplexity


@pytest.mark.parametrize(("header", "name", "value"), [
    ("sp|P62593|BLAT_ECOLX Beta-lactamase TEM OS=Escherichia coli OX=562 GN=bla PE=1 SV=1", "OS", "Escherichia coli"),
    ("sp|P62593|BLAT_ECOLX Beta-lactamase TEM OS=Escherichia coli OX=562 GN=bla PE=1 SV=1", "SV", "1"),
    ("tr|A0A1|X OS=Influenza A virus (strain A/Puerto Rico/8/1934 H1N1) OX=211044", "OS",
     "Influenza A virus (strain A/Puerto Rico/8/1934 H1N1)"),
    ("UniRef50_A0A5A9P0L4 peptidylprolyl isomerase n=1 Tax=Triplophysa tibetana TaxID=1572043 RepID=A0A5A9P0L4_9TELE", "Tax",
     "Triplophysa tibetana"),
    ("lcl|x [gene=abc] [organism=Homo sapiens] [protein=y]", "organism", "Homo sapiens"),
    ("tr|A0A1|X OS=[Clostridium] ultunense Esp OX=1288971 GN=x", "OS", "[Clostridium] ultunense Esp"),
    ("tr|A0A1|X OS=[Clostridium] ultunense Esp", "OS", "[Clostridium] ultunense Esp"),
    ("lcl|x [organism=[Clostridium] ultunense] [protein=y]", "organism", "[Clostridium] ultunense"),
    ("x [OS=Homo sapiens OX=9606] y", "OS", "Homo sapiens"), ("x OS=Homo sapiens [gene=y]", "OS", "Homo sapiens"),
    ("sp|P1|X FOS=no", "OS", None), ("sp|P1|X OS= OX=3", "OS", None), (None, "OS", None),
])  # fmt: skip
def test_fields(header, name, value):
    assert groups.field(header, name) == value


def test_groups_add_up(proteins, make_recipe, make_model):
    recipe = make_recipe()
    result = perplexity.evaluate(make_model(recipe), proteins, recipe, device=torch.device("cpu"), budget=10_000)
    entries = groups.by_field(result, proteins, "OS")
    assert [e["group"] for e in entries] == ["Homo sapiens", "Mus musculus"]
    assert sum(e["targets"] for e in entries) == result.targets_S.sum()
    nats = sum(e["targets"] * np.log(e["perplexity_mask"]) for e in entries)
    assert np.exp(nats / result.targets_S.sum()) == pytest.approx(result.perplexity("mask"))
    few = groups.by_field(result, proteins, "OX", groups=3)
    assert len(few) == 4 and few[-1]["group"] == groups.OTHERS
    assert sum(e["sequences"] for e in few) == 40


def test_unknown_field_names_those_there_are(proteins, make_recipe, make_model):
    recipe = make_recipe()
    result = perplexity.evaluate(make_model(recipe), proteins, recipe, device=torch.device("cpu"), budget=500)
    with pytest.raises(RequestError, match="OS, OX"):
        groups.by_field(result, proteins, "Tax")
