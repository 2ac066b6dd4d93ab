"""The ZeRO paper's published figures (arXiv 1910.02054v3), with where each comes from.

Marks: V read in the paper's text · S a table read second-hand · M from memory, not seen in a text, though its
arithmetic is consistent. Figures marked S or M are shown and never asserted.
"""

from __future__ import annotations

from typing import NamedTuple

# Table 1 [V]: GB a device by data-parallel degree; stages 1, 2, 3 for 7.5 B, 128 B and 1 T parameters.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}
TABLE_1_MODELS = (7_500_000_000, 128_000_000_000, 1_000_000_000_000)

# Table 2 [V]: largest model on 32 GB devices at 64 data-parallel ranks, in billions, by model-parallel degree.
TABLE_2 = {
    1: ("2", "7.6", "14.4", "128"),
    2: ("4", "15.2", "28.8", "256"),
    4: ("8", "30.4", "57.6", "512"),
    8: ("16", "60.8", "115.2", "1024"),
    16: ("32", "121.6", "230.4", "2048"),
}
# As printed for stage 3: 0.5T, 1T and 2T stand for 512, 1024 and 2048.
TABLE_2_MEASURED = {1: (1.3, 6.2), 2: (2.5, 12.5), 4: (5, 25), 8: (10, 50), 16: (20, 100)}


class Model(NamedTuple):
    """A model as the paper names it. ``hidden_printed`` where the paper's table says another width."""

    name: str
    layers: int
    hidden: int
    hidden_printed: int | None = None


# Table 4 [V].
MODELS = (
    Model("1.16B", 24, 1920),
    Model("1.5B (figures 3, 4)", 34, 1920),
    Model("1.5B (figure 2)", 48, 1600),
    Model("2.5B", 54, 1920),
    Model("4B", 64, 2304),
    Model("6B", 52, 3072),
    Model("8B", 72, 3072),
    Model("10B", 50, 4096),
    Model("11B", 54, 4096),
    Model("12B", 58, 4096),
    Model("13B", 62, 4096),
    Model("40B", 88, 6144, 4096),
    Model("60B", 132, 6144, 4096),
    Model("60B (figure 3)", 75, 8192),
    Model("80B", 100, 8192),
    Model("100B", 125, 8192),
    Model("120B", 150, 8192),
    Model("140B", 175, 8192),
    Model("170B", 212, 8192),
)


class Run(NamedTuple):
    """GPUs, model-parallel degree, attention heads, batch a model replica, samples a step."""

    gpus: int
    tensor: int
    heads: int
    batch: int
    total: int


# Table 5 [M]: figure 2's runs, (ZeRO, baseline).
TABLE_5 = {
    "1.5b": (48, 1600, Run(400, 1, 16, 24, 9600), Run(400, 2, 16, 16, 3200)),
    "8b": (72, 3072, Run(400, 4, 24, 64, 6400), Run(400, 8, 24, 8, 400)),
    "40b": (88, 6144, Run(400, 4, 32, 12, 1200), Run(384, 32, 64, 4, 48)),
    "60b": (132, 6144, Run(400, 16, 32, 64, 1600), Run(384, 64, 64, 4, 24)),
    "80b": (100, 8192, Run(400, 16, 64, 32, 800), Run(384, 128, 128, 4, 12)),
    "100b": (125, 8192, Run(400, 16, 64, 32, 800), Run(384, 128, 128, 2, 6)),
    "120b": (150, 8192, Run(400, 16, 64, 24, 600), Run(384, 128, 128, 2, 6)),
    "140b": (175, 8192, Run(400, 16, 64, 16, 400), Run(384, 128, 128, 2, 6)),
    "170b": (212, 8192, Run(400, 16, 64, 12, 300), Run(256, 256, 256, 2, 2)),
}
# Table 8 [S]: figure 7's runs under the five configurations of table 3.
TABLE_8 = {"40b": (50, 8192, Run(400, 16, 32, 16, 400)), "100b": (125, 8192, Run(400, 16, 64, 32, 800))}
# Table 3 [V]: stage, and what becomes of stored activations.
TABLE_3 = {
    "c1": (1, "whole"),
    "c2": (1, "partitioned"),
    "c3": (2, "whole"),
    "c4": (2, "partitioned"),
    "c5": (2, "host"),
}
# Figure 6 [V]: the largest model that ran, billions; C3 is [M].
FIGURE_6 = {"c1": "40", "c2": "60", "c3": "50 [M]", "c4": "140", "c5": "150"}
# Figure 4 [V] for layers and widths; heads and batches only as ranges [S].
FIGURE_4 = ("1.16b", "1.5b", "2.5b", "4b", "6b", "8b", "10b", "11b", "12b", "13b")
