"""Which modules form a unit under which rule, and what stays out of all of them."""

from __future__ import annotations

import pytest

from launcher.contract.partition import Parameter, gpt_parameters
from launcher.contract.train import Units
from launcher.contract.units import Module, Tree, gpt_tree, group

# A block of width 15: norm1 120 bytes, attention 3840, norm2 120, mlp 7500 (up 3840, down 3660); 11580 in all.
PARAMETERS = [p for _, row in gpt_parameters(2, 15, 7, 37) for p in row]


def _b(*names: str) -> list[tuple[str, ...]]:
    return [tuple(f"blocks.{i}.{n}" for n in row.split()) for i in (0, 1) for row in names]


RULES: dict[str, tuple[Units | None, list[tuple[str, ...]]]] = {
    "none": (None, [("blocks.0",), ("blocks.1",)]),
    "class": (Units(classes=("Block",)), [("blocks.0",), ("blocks.1",)]),
    "outermost": (Units(classes=("Linear", "MLP")), _b("attention.qkv", "attention.out", "mlp")),
    "names": (Units(names=("blocks.*.attention", "blocks.*.mlp")), _b("attention", "mlp")),
    "a star takes dots": (Units(names=("blocks.*",)), [("blocks.0",), ("blocks.1",)]),
    "divided": (Units(size_bytes=6000), _b("norm1 attention norm2", "mlp.up", "mlp.down")),
    "divided once": (Units(size_bytes=8000), _b("norm1 attention norm2", "mlp")),
    "whole": (Units(size_bytes=11580), [("blocks.0",), ("blocks.1",)]),
    "filled": (Units(size_bytes=30000), [("blocks.0", "blocks.1")]),
    "smaller than all": (
        Units(size_bytes=1),
        _b("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down"),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_chooses_modules(name: str) -> None:
    rule, expected = RULES[name]
    units = group(PARAMETERS, gpt_tree(2), rule)
    assert [unit.modules for unit in units if unit.modules] == expected
    assert len({unit.name for unit in units}) == len(units)
    held = [p.name for unit in units for p in unit.parameters]
    assert sorted(held) == sorted(p.name for p in PARAMETERS), "each parameter once"
    for unit in units:
        for parameter in unit.parameters:
            inside = any(parameter.name.startswith(f"{m}.") for m in unit.modules)
            assert inside == bool(unit.modules), "a unit's parameters lie in its modules; the root's in none"


def test_tied_weights_and_what_others_use_stay_out() -> None:
    everything = group(PARAMETERS, gpt_tree(2), Units(classes=("Embedding", "Block", "LayerNorm")))
    assert [(u.name, u.modules) for u in everything] == [
        ("embedding-2", ()),  # the head uses it, and the model says so
        ("position", ("position",)),
        ("blocks.0", ("blocks.0",)),
        ("blocks.1", ("blocks.1",)),
        ("norm", ("norm",)),
    ]
    rows = [
        Parameter("layers.0.w", (3,), tied=("layers.1.w",)),
        Parameter("layers.0.own", (2,)),
        Parameter("layers.1.own", (2,)),
    ]
    tree = Tree([Module("", ("M",)), *(Module(n, ("L",)) for n in ("layers", "layers.0", "layers.1"))], ["layers.0"])
    found = group(rows, tree._replace(blocks=["layers.0", "layers.1"]), None)
    assert [(u.name, u.modules) for u in found] == [
        ("layers.0-2", ()),
        ("layers.0", ("layers.0",)),
        ("layers.1", ("layers.1",)),
    ]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (Units(classes=("Blok",)), r"class: 'Blok' matches no module with parameters; closest: Block"),
        (Units(names=("block.*.mlp", "blocks.*")), r"names: 'block\.\*\.mlp' matches no module"),
    ],
)
def test_a_rule_that_chooses_nothing_is_refused(rule: Units, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        group(PARAMETERS, gpt_tree(2), rule)
