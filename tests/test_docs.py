"""Pages that are generated, or that name files and commands, stay true."""

from pathlib import Path

from bmoe.reports.recipe_reference import reference

DOCS = Path(__file__).parent.parent / "docs"


def test_recipe_reference_is_current():
    text = (DOCS / "recipe.md").read_text()
    assert text == reference(), "run: python -m bmoe.reports.recipe_reference > docs/recipe.md"
