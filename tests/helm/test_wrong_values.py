"""Values that cannot work are refused before anything is installed, by both helms, and the refusal names the key.

The words differ between helm 3 and 4, so it is the key that is looked for.
"""

from __future__ import annotations

import re

import pytest

from tests.helm.programs import HELM_3, HELM_4, Values, template
from tests.helm.wrong import ALONE, TOGETHER, at

CASES = [(key, at(key, value)) for key, value in ALONE] + TOGETHER


def names(told: str, key: str) -> bool:
    """Whether a refusal names the key: as a.b.c, as /a/b/c, or as the unknown key 'c' in a.b."""
    dotted, slashed = re.escape(key), re.escape("/" + key.replace(".", "/"))
    if re.search(rf"(?<![\w.-]){dotted}(?![\w-])|{slashed}(?![\w-])", told):
        return True
    parent, _, last = key.rpartition(".")
    if f"invalid propertyName '{last}'" in told:
        return True  # helm 4 names the key and, by a mistake of its own, some other place
    here = (
        rf"(?<![\w.-]){re.escape(parent)}(?![\w.-])|{re.escape('/' + parent.replace('.', '/'))}(?![\w/-])" if parent else r"\(root\)|at ''"
    )
    return any(re.search(here, line) and re.search(rf"(?<![\w-]){re.escape(last)}(?![\w-])", line) for line in told.splitlines())


@pytest.mark.parametrize("version", [HELM_3, HELM_4])
@pytest.mark.parametrize(("key", "values"), CASES, ids=[f"{key}-{i}" for i, (key, _) in enumerate(CASES)])
def test_wrong_values_are_refused_by_their_key(key: str, values: Values, version: str) -> None:
    done = template(values, version=version)
    assert done.returncode != 0, "helm took it"
    assert names(done.stderr, key), done.stderr
    assert "nil pointer" not in done.stderr and "<no value>" not in done.stderr
