# ruff: noqa: E501  (answers stand here as they are printed)
"""What a wrong description is answered with: every mistake at once, each with its place, in plain words."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.contract.errors import DescriptionError, Exit
from launcher.specs import Job, parse_text
from launcher.specs.environment import OWNED
from launcher.specs.job_model import Checkpoint

CLUSTER = "name: c\nbackend: slurm\npaths: {runs: /r}\n"
DIRECT = "name: c\nbackend: direct\nnodes: {names: 'n[1-2]'}\npaths: {runs: /r}\n"
JOB = """name: j
model: {kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}
data: {text: python-stdlib}
zero: {stage: 2}
optimizer: {lr: 3e-4}
batch: {global: 64, micro: 8}
steps: 200
"""


def mistakes(kind: str, text: str | bytes) -> list[str]:
    with pytest.raises(DescriptionError) as caught:
        if kind == "job":
            parse_text("job", text, "f.yaml")
        else:
            parse_text("cluster", text, "f.yaml")
    assert caught.value.exit_code == Exit.USAGE == 2
    return str(caught.value).split("\n")


WRONG_CLUSTER = """\
name: my/uni
backend: slrum
login: {host: "-oProxyCommand=x", port: 99999}
slurm:
  partiton: gpu
  exclusive: yes
  extra: {job-name: x, Mail: y, comment: "a\\nb", hold: null}
nodes: {names: "gpu[01-25,x]", slots: 0, memory_per_slot: 120Gb, time_max: 24h30}
device: {kind: tpu, memory: 32GiB, reserve: 40GiB, peak_flops: {bf61: 3T}, precisions: bf16}
pools: {a100: {slots: 0, gpu_type: x}, b: {like: a10}, c: {like: d}, d: {like: c, time_max: 1}}
paths: {runs: scratch/runs, node_local: scratch}
network: {between: 800Gb, ports: 5-70000}
env: {RANK: "1", "A B": c, OK: }
name: again
python: -c
"""

WRONG_CLUSTER_ANSWER = """\
uni.yaml:1:7: name 'my/uni' is not safe; accepted: up to 128 letters, digits, '.', '_', '-', first a letter or digit
uni.yaml:2:10: 'slrum' is not accepted; accepted: slurm, direct (did you mean 'slurm'?)
uni.yaml:3:15: host name '-oProxyCommand=x' begins with '-': programs would read it as an option
uni.yaml:3:41: 99999 is out of range; accepted: from 1 to 65535
uni.yaml:5:3: unknown key 'partiton' (did you mean 'partition'?); accepted: partition, account, qos, constraint, reservation, exclusive, gpus_by, gpu_type, extra
uni.yaml:6:14: true or false was expected, not 'yes' (write true)
uni.yaml:7:11: option 'job-name' is set by the launcher; write the job's name
uni.yaml:7:24: 'Mail' is not an option of sbatch; accepted: names like mail-type, without '--'
uni.yaml:7:42: 'a\\nb' must stand on one line; it holds '\\n'
uni.yaml:8:1: 'nodes' does not go with pools: write it into each pool
uni.yaml:8:27: range 'x' is not a number or number-number
uni.yaml:8:39: 0 is out of range; accepted: from 1 to 65536
uni.yaml:8:59: '120Gb' is in bits; accepted: 32GB (10⁹ bytes), 32GiB (2³⁰ bytes), 512MiB, 25MB, or a plain number of bytes
uni.yaml:8:76: '24h30' is not a time; accepted: H:M:S, M:S, D-H, D-H:M, D-H:M:S or minutes as in Slurm (a bare 30 is 30 minutes), or 90s, 30min, 2h
uni.yaml:9:1: 'device' does not go with pools: write it into each pool
uni.yaml:9:16: 'tpu' is not accepted; accepted: cpu, gpu (did you mean 'gpu'?)
uni.yaml:9:45: reserve 40GiB leaves nothing of memory 32GiB
uni.yaml:9:65: unknown precision 'bf61' (did you mean 'bf16'?); accepted: fp64, fp32, tf32, bf16, fp16, fp8
uni.yaml:9:88: a list was expected, not 'bf16'; accepted: [a, b]
uni.yaml:10:23: 0 is out of range; accepted: from 1 to 65536
uni.yaml:10:36: gpu_type needs gpus_by: gres or gpus_by: gpus-per-node, here or under slurm
uni.yaml:10:50: there is no pool 'a10' (did you mean 'a100'?); the cluster has a100, b, c, d
uni.yaml:10:66: pools are like each other in a circle: c → d → c
uni.yaml:10:80: pools are like each other in a circle: d → c → d
uni.yaml:11:15: 'scratch/runs' is a relative path; accepted: an absolute one, or one beginning with ~ or $NAME
uni.yaml:11:41: 'scratch' is a relative path; accepted: an absolute one, or one beginning with ~ or $NAME
uni.yaml:12:20: '800Gb' is in bits without 'a second'; accepted: 800Gbps (bits), 300GB/s or 300GiB/s (bytes)
uni.yaml:12:34: '5-70000': ports go upward from 1024 to 65535
uni.yaml:13:7: RANK is set by the launcher and cannot be given
uni.yaml:13:18: 'A B' is not a variable's name; accepted: letters, digits, '_', not beginning with a digit
uni.yaml:13:28: a value is missing; write "" for empty text
uni.yaml:14:1: duplicate key 'name'; it stands in line 1 too
uni.yaml:15:9: '-c' begins with '-' and would be read as an option"""

WRONG_JOB = """\
name: gpt
nodes: four
time: 1:2:3:4
pool: -a
model: {kind: gpt, layers: 4, hiden: 3, hidden: 512, heads: 7, seq_len: 1e3}
data: {text: python-stdlib, tokens: ../x, options: {a: 1}}
zero: {stage: 4, bucket: 25}
parallel: {tensor: 0}
optimizer: {lr: -1, betas: [0.9], clip: 0, warmup: 500, groups: [{match: [x]}, {match: [], lr: 0}]}
batch: {global: 30, micro: 8, accumulation: 2}
steps: 300
precision: fp8
recompute: [1, 4]
activations: partitioned
checkpoint: {every: 30 parsecs, foreign: x}
secrets: [A, A, "x y", B]
env: {B: 1}
outputs: [../a, '/x', '$ZERUN_RUN_DIR/attempts/*']
"""

WRONG_JOB_ANSWER = """\
gpt.yaml:2:8: a whole number was expected, not 'four'
gpt.yaml:3:7: '1:2:3:4' is not a time; accepted: H:M:S, M:S, D-H, D-H:M, D-H:M:S or minutes as in Slurm (a bare 30 is 30 minutes), or 90s, 30min, 2h
gpt.yaml:4:7: '-a' begins with '-' and would be read as an option
gpt.yaml:5:31: unknown key 'hiden' (did you mean 'hidden'?); accepted: kind, layers, hidden, heads, seq_len, vocab, dropout, weights
gpt.yaml:5:61: hidden 512 cannot be divided among 7 heads; accepted near it: 2, 4, 8
gpt.yaml:5:73: a whole number was expected, not '1e3'
gpt.yaml:6:7: data takes exactly one of text, tokens, dataset, datasets, factory, not text and tokens
gpt.yaml:6:37: '../x' leaves the shipped code; accepted: a path inside it, or absolute on the cluster
gpt.yaml:6:43: options go with data.factory, or with a model of your own
gpt.yaml:7:15: '4' is not accepted; accepted: 0, 1, 2, 3
gpt.yaml:8:20: 0 is out of range; accepted: at least 1
gpt.yaml:9:17: -1 is out of range; accepted: more than 0
gpt.yaml:9:28: a list of 1 was given; accepted: two numbers, [0.9, 0.95]
gpt.yaml:9:41: 0 is out of range; accepted: more than 0
gpt.yaml:9:52: warmup 500 is longer than steps 300
gpt.yaml:9:66: a group changes nothing; write lr, weight_decay or both beside match
gpt.yaml:9:88: match is empty; accepted: patterns of parameters' names, ["*.bias", "*norm*"]
gpt.yaml:9:96: 0 is out of range; accepted: more than 0
gpt.yaml:10:17: global 30 is not a multiple of micro 8; accepted near it: 24 and 32, or micro 6
gpt.yaml:10:31: write global or accumulation, not both: one follows from the other
gpt.yaml:12:12: 'fp8' is not accepted; accepted: fp32, bf16, fp16
gpt.yaml:13:16: block 4 is not there; accepted: 0 to 3
gpt.yaml:14:14: activations: partitioned needs parallel.tensor above 1: its ranks share them
gpt.yaml:15:21: '30 parsecs' is not accepted; accepted: a number of steps, or 90s, 30min, 2h
gpt.yaml:15:33: foreign goes with program: the engine saves its own
gpt.yaml:16:14: A is named twice
gpt.yaml:16:17: 'x y' is not a variable's name; accepted: letters, digits, '_', not beginning with a digit
gpt.yaml:16:24: B stands under env too; a secret comes from your environment
gpt.yaml:18:11: '../a' is no pattern inside the run; accepted: samples/**, or $ZERUN_RUN_DIR/out/*.png
gpt.yaml:18:17: '/x' is no pattern inside the run; accepted: samples/**, or $ZERUN_RUN_DIR/out/*.png
gpt.yaml:18:23: '$ZERUN_RUN_DIR/attempts/*' begins in the run's own folder: name a folder of your own there, $ZERUN_RUN_DIR/out/*"""


def test_every_mistake_of_a_cluster_at_once() -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_text("cluster", WRONG_CLUSTER, "uni.yaml")
    assert str(caught.value) == WRONG_CLUSTER_ANSWER


def test_every_mistake_of_a_job_at_once() -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_text("job", WRONG_JOB, "gpt.yaml")
    assert str(caught.value) == WRONG_JOB_ANSWER


# --- YAML itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "f.yaml: the file is empty"),
        ("# nothing\n", "f.yaml: the file is empty"),
        ("- a\n", "f.yaml:1:1: lines of 'key: value' were expected"),
        ("name\n", "f.yaml:1:1: lines of 'key: value' were expected"),
        (DIRECT + "---\nname: d\n", "f.yaml:5:1: a second document begins here ('---'); a description is one document"),
        (DIRECT + "<<: {python: x}\n", "f.yaml:5:1: merge keys ('<<') are not accepted; write the keys out"),
        (DIRECT + "env:\n  <<: {A: x}\n", "f.yaml:6:3: merge keys ('<<') are not accepted; write the keys out"),
        (DIRECT + "python: !env HOME\n", "f.yaml:5:9: the tag !env is not accepted; write the value without a tag"),
        (
            DIRECT + "python: !!python/object/apply:os.system [x]\n",
            "f.yaml:5:9: the tag !!python/object/apply:os.system is not accepted; write the value without a tag",
        ),
        (DIRECT + "env:\n\tA: x\n", "f.yaml:6:1: a tab stands where YAML wants spaces"),
        (DIRECT + "env: {A: *y}\n", "f.yaml:5:10: the alias names no anchor: 'y'"),
        (DIRECT + "env: &e {A: *e}\n", "f.yaml:5:6: an alias stands inside its own anchor"),
        (DIRECT + "env: {A: x\npython: y\n", "f.yaml:6:7: not YAML: expected ',' or '}', but got ':' while parsing"),
        (DIRECT + "setup: a\x07\n", "f.yaml:5:9: the character '\\x07' is not allowed in YAML; write it as an escape"),
        ((DIRECT + "setup: é").encode() + b"\xff\n", "f.yaml:5:9: the file is not UTF-8 text"),
        (DIRECT + "? [a]\n: b\n", "f.yaml:5:3: a key must be a word, not a list or a mapping"),
        (DIRECT + "env:\n  A: 1\n  B: 2\n  A: 3\n", "f.yaml:8:3: duplicate key 'A'; it stands in line 6 too"),
        (DIRECT + "env: {A: [1]}\n", "f.yaml:5:10: text was expected, not a list"),
        (DIRECT + "env: [A]\n", "f.yaml:5:6: a mapping was expected, not a list; accepted: lines of 'key: value'"),
        (DIRECT + "ssh: x\n", "f.yaml:5:6: a mapping was expected, not 'x'; its keys: config, jump, user, port, key, "),
        (DIRECT + 'env: {A: "\\0"}\n', "f.yaml:5:10: text cannot hold a NUL character"),
    ],
)  # fmt: skip
def test_yaml_traps_have_their_place(text: str | bytes, says: str) -> None:
    assert mistakes("cluster", text)[0].startswith(says)


def test_aliases_that_explode_are_cut() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "the description grows above 200,000 values" in "\n".join(mistakes("cluster", "\n".join(lines)))


def test_the_boolean_trap_is_named() -> None:
    assert mistakes("cluster", CLUSTER + "slurm: {exclusive: on}\n") == [
        "f.yaml:4:20: true or false was expected, not 'on' (write true)"
    ]


# --- clusters -------------------------------------------------------------------------------------


def test_how_a_login_node_is_reached_stands_under_login() -> None:
    said = mistakes("cluster", CLUSTER + "login: {host: h}\nssh: {via: openssh}\n")
    assert "under login" in said[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: c\nbackend: direct\npaths: {runs: /r}\n", "1:1: 'nodes' is missing: backend: direct needs names"),
        ("name: c\nbackend: direct\nnodes: {slots: 2}\npaths: {runs: /r}\n", "3:8: backend: direct needs names (node[01-04])"),
        ("name: c\nbackend: direct\nnodes: []\npaths: {runs: /r}\n", "3:8: the list of nodes is empty"),
        ("name: c\nbackend: slurm\n", "1:1: paths.runs is missing"),
        ("name: c\nbackend: slurm\npaths: {shared: true}\n", "3:8: paths.runs is missing"),
        (CLUSTER.replace("/r", "/r, shared: false"), "3:27: with Slurm, runs must be shared"),
        (CLUSTER + "nodes: [{name: a}]\n", "4:8: a list of nodes is for backend: direct"),
        (CLUSTER + "nodes: {hostfile: h}\n", "4:9: hostfile is for backend: direct"),
        (CLUSTER + "ssh: {jump: gate}\n", "4:1: ssh says how a login node is reached, and there is no login"),
        (CLUSTER + "slurm: {gpu_type: a100}\n", "4:19: gpu_type needs gpus_by"),
        (CLUSTER + "slurm: {partition: 'a\nb'}\n", None),
        (CLUSTER + "slurm: {partition: \"a\\n#SBATCH --wrap=x\"}\n", "4:20: 'a\\n#SBATCH --wrap=x' must stand on one line"),
        (CLUSTER + "slurm: {partition: --wrap=x}\n", "4:20: '--wrap=x' begins with '-'"),
        (CLUSTER + "slurm: {partition: ''}\n", "4:20: a value is missing: the text is empty"),
        (CLUSTER + "nodes: {names: 'n[2-1]'}\n", "4:19: range '2-1' goes down"),
        (CLUSTER + "nodes: {names: 'n[1-2],n1'}\n", "4:16: node 'n1' is named twice"),
        (DIRECT + "slurm: {partition: x}\n", "5:1: slurm is for backend: slurm"),
        (DIRECT + "login: {host: x}\n", "5:1: login is for backend: slurm"),
        (DIRECT + "container: {runtime: pyxis, image: x}\n", "5:22: pyxis is a plugin of srun"),
        (DIRECT + "ssh: {jump: 'me@gate:x'}\n", "5:13: jump host 'me@gate:x': 'x' is not a port"),
        (DIRECT + "ssh: {jump: 'a b'}\n", "5:13: host name 'a b' holds ' '"),
        (DIRECT + "python: ~/venv/bin/python\n", "5:9: '~/venv/bin/python' is not expanded"),
        (DIRECT + "ssh: {user: '-l'}\n", "5:13: user name '-l' is not safe"),
        (DIRECT.replace("{names: 'n[1-2]'}", "[{name: a}, {name: a}]"), "3:8: node 'a' is named twice"),
        (DIRECT.replace("{names: 'n[1-2]'}", "[{name: a;b}]"), "3:16: host name 'a;b' holds ';'"),
        (DIRECT.replace("{names: 'n[1-2]'}", "[{name: a, slots: 2, devices: [0]}]"), "3:38: devices lists 1, slots says 2"),
        (DIRECT.replace("{names: 'n[1-2]'}", "{names: 'n[1-70000]'}"), "3:17: the list names more than 65,536 nodes"),
        (DIRECT.replace("{names", "{hostfile: h, names"), "3:9: write names or hostfile, not both"),
        (DIRECT.replace("{names", "{entries: [], names"), "3:9: unknown key 'entries'"),
        (DIRECT + "datasets: {p: {train: data/x.bin}}\n", "5:23: 'data/x.bin' is no absolute path of a file"),
        (DIRECT + "datasets: {p: {train: /x, train_digest: md5:1}}\n", "5:41: 'md5:1' is no digest; accepted: xxh3: and 32"),
        (DIRECT + "datasets: {p: {train: /a/x, heldout: /b/x}}\n", "5:38: train and heldout have one file name"),
        (DIRECT + "datasets: {a/b: {train: /x}}\n", "5:11: dataset 'a/b': a name has letters"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_in_a_cluster(text: str, says: str | None) -> None:
    if says is None:  # a folded line break in quotes is a space to YAML
        assert parse_text("cluster", text, "f.yaml").slurm.partition == "a b"
    else:
        assert mistakes("cluster", text)[0].startswith(f"f.yaml:{says}")


@pytest.mark.parametrize(
    "option",
    [
        *("job-name", "output", "error", "nodes", "ntasks", "ntasks-per-node", "parsable", "wrap", "export", "requeue"),
        *("no-requeue", "signal", "open-mode", "array", "chdir", "gres", "mem", "time"),
        *("wra", "parsabl", "job-", "expor", "nta"),
    ],
)
def test_sbatch_options_of_the_launcher_are_refused_also_shortened(option: str) -> None:
    assert (
        f"option {option!r} is set by the launcher"
        in mistakes("cluster", CLUSTER + f"slurm: {{extra: {{{option}: x}}}}\n")[0]
    )


@pytest.mark.parametrize(
    "option", ["mail-type", "mail-user", "comment", "dependency", "nodelist", "exclude", "licenses", "time-min"]
)
def test_other_sbatch_options_are_fine(option: str) -> None:
    assert parse_text("cluster", CLUSTER + f"slurm: {{extra: {{{option}: x}}}}\n", "f").slurm.extra == {option: "x"}


@pytest.mark.parametrize("option", ["--wrap", "Mail", "a b", "a=b", "1a", "é", "a\\nb"])
def test_names_of_sbatch_options_are_plain(option: str) -> None:
    assert "is not an option of sbatch" in mistakes("cluster", CLUSTER + f'slurm: {{extra: {{"{option}": x}}}}\n')[0]


# --- jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch: {global: 64, micro: 8}", "batch: {micro: 8}", "6:8: batch needs global or accumulation beside micro"),
        ("batch: {global: 64, micro: 8}", "batch: {global: 64, accumulation: 8}", "6:1: 'micro' is missing"),
        ("global: 64", "global: 0", "6:17: 0 is out of range"),
        ("data: {text", "data: {stage_to: node_local, text", "3:8: stage_to goes with tokens or dataset"),
        ("data: {text: python-stdlib}", "data: {}", "3:7: data takes exactly one of text, tokens, dataset, datasets, factory, not none"),
        ("data: {text: python-stdlib}", "data: {datasets: [a]}", "3:8: datasets go with program; a model reads one: dataset"),
        ("data: {text: python-stdlib}", "data: {text: x}", "3:14: 'x' is not accepted; accepted: python-stdlib"),
        ("data: {text: python-stdlib}", "data: {tokens: ~/x}", "3:16: '~/x' is not a plain path"),
        ("data: {text: python-stdlib}", "data: {text: python-stdlib, heldout: x}", "3:29: heldout goes with tokens"),
        ("data: {text: python-stdlib}", "data: {factory: my.module}", "3:17: 'my.module' does not name a function"),
        ("data: {text: python-stdlib}", "data: {tokens: x}\nevaluate: {every: 1}", "4:1: evaluate needs data.heldout"),
        ("{kind: gpt, layers: 8", "{kind: gtp, layers: 8", "2:15: 'gtp' is not accepted; accepted: gpt (did you mean 'gpt'?)"),
        ("{kind: gpt, layers: 8", "{layers: 8", "2:1: 'kind' is missing"),
        ("seq_len: 256}", "seq_len: 256, vocab: 100}", "2:75: vocab 100 is too small: text is read as bytes"),
        ("seq_len: 256}", "seq_len: 256, dropout: 1}", "2:77: 1 is out of range; accepted: at least 0 and less than 1"),
        ("name: j", 'name: j\nenv: {A: "\\ud800"}', "2:10: '\\ud800' is not text: it holds what is no UTF-8"),
        ("name: j", "name: j\nsecrets: [[A]]\nenv: {A: b}", "2:11: "),
        ("layers: 8", "layers: 99999999", "2:28: 99999999 is out of range; accepted: from 1 to 10000"),
        ("layers: 8", "layers: 1_000", "2:28: a whole number was expected, not '1_000'"),
        ("lr: 3e-4", "lr: .inf", "5:17: a number was expected, not '.inf'"),
        ("lr: 3e-4", "lr: 1e999", "5:17: '1e999' is not finite"),
        ("lr: 3e-4", "lr: 3e-4, betas: [0.9, 1.0]", "5:36: 1 is out of range"),
        ("zero: {stage: 2}", "zero:", "4:1: 'zero' is missing"),
        ("steps: 200", "steps: -3", "7:8: -3 is out of range; accepted: at least 1"),
        ("name: j", "name: ../j", "1:7: name '../j' is not safe"),
        ("name: j", 'name: "j\\n"', "1:7: 'j\\n' must stand on one line"),
        ("name: j", "name: j\nslots_per_node: 0", "2:17: '0' is not accepted; accepted: all, or a number from 1"),
        ("name: j", "name: j\nsecrets: K", "2:10: a list was expected, not 'K'"),
        ("name: j", "name: j\nsecrets: [ZERUN_TOKEN]", "2:11: ZERUN_TOKEN is set by the launcher"),
        ("name: j", "name: j\ntime: 0", "2:7: 0 is out of range; accepted: at least 1"),
        ("name: j", "name: j\ncheckpoint: {every: 0}", "2:21: '0' is out of range; accepted: 1 step"),
        ("name: j", "name: j\ncheckpoint: {every_steps: 5}", "2:14: unknown key 'every_steps'"),
        ("name: j", "name: j\nprogram: {argv: [x]}", "3:1: 'model' does not go with program"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_in_a_job(old: str, new: str, says: str) -> None:
    assert old in JOB
    assert mistakes("job", JOB.replace(old, new))[0].startswith(f"f.yaml:{says}")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("{text: python-stdlib}", "3:8: 'text' does not go with program; accepted: tokens, heldout, dataset, datasets"),
        ("{dataset: a, options: {b: 1}}", "3:20: 'options' does not go with program"),
        ("{dataset: a, datasets: [b]}", "3:7: data takes exactly one of"),
        ("{datasets: [a, b, a]}", "3:25: a is named twice"),
        ("{datasets: [a-b, a.b]}", "3:24: a.b and a-b would both be ZERUN_DATA_A_B_…"),
        ("{datasets: []}", "3:7: data takes exactly one of"),
    ],
)
def test_data_of_a_program_are_files(data: str, says: str) -> None:
    assert mistakes("job", f"name: j\nprogram: {{argv: [x]}}\ndata: {data}\n")[0].startswith(f"f.yaml:{says}")


def test_a_job_that_trains_nothing_or_half() -> None:
    assert mistakes("job", "name: j\n") == [
        "f.yaml:1:1: the job trains nothing: write model, data, zero, optimizer, batch, steps, or program"
    ]
    assert mistakes("job", "name: j\nzero: {stage: 0}\nsteps: 3\n") == [
        f"f.yaml:1:1: {key!r} is missing" for key in ("batch", "data", "model", "optimizer")
    ]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("{argv: []}", "argv is empty"),
        ("{argv: ['']}", "argv is empty"),
        ("{argv: python train.py}", "a list was expected, not 'python train.py'"),
        ("{argv: [x], stop_signal: KILL}", "'KILL' is not accepted; accepted: TERM, INT, HUP, QUIT, USR1, USR2"),
        ("{argv: [x], stop_grace: 30}", "'30' has no unit"),
        ('{argv: [x, "a\\0b"]}', "NUL"),
    ],
)
def test_programs_refused(program: str, says: str) -> None:
    assert says in mistakes("job", f"name: j\nprogram: {program}\n")[0]


@pytest.mark.parametrize("name", [*sorted(OWNED), "ZERUN_RUN_DIR", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS_PER_NODE"])
def test_variables_of_the_launcher_are_refused(name: str) -> None:
    assert f"{name} is set by the launcher" in mistakes("job", JOB + f"env: {{{name}: x}}\n")[0]


def test_values_of_variables_may_be_any_text() -> None:
    text = "a,b 'c' \"d\" $HOME\n`x` é = %j \t#!"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    assert parse_text("job", JOB + f'env: {{A: "{escaped}"}}\n', "f").env == {"A": text}


def test_every_field_has_a_refusal_in_plain_words() -> None:
    """A list where one value belongs is answered by us everywhere, never in pydantic's terms."""
    for key in (k for k in Job.keys(written=True) if k not in {"secrets", "recompute"}):
        text = "\n".join(line for line in JOB.splitlines() if not line.startswith(f"{key}:")) + f"\n{key}: [[x]]\n"
        said = "\n".join(mistakes("job", text))
        assert not re.search(r"[Ii]nput should|valid dictionary|unable to", said), said
    assert "every" in Checkpoint.keys(written=True)


# --- anything at all ------------------------------------------------------------------------------

_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.text(max_size=6),
        st.sampled_from(["gpt", "32GB", "1-2", "localhost"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
_JOB_KEYS = st.sampled_from(
    ["model", "data", "zero", "batch", "optimizer", "checkpoint", "env", "secrets", "program", "code", "x"]
)
_CLUSTER_KEYS = st.sampled_from(
    ["backend", "nodes", "paths", "login", "slurm", "ssh", "device", "network", "env", "python", "x"]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(_JOB_KEYS, _VALUES, max_size=5), st.dictionaries(_CLUSTER_KEYS, _VALUES, max_size=5))
def test_any_tree_is_read_or_refused(job: dict[str, object], cluster: dict[str, object]) -> None:
    import json

    # JSON is YAML; what is quoted in it stays text, as it should.
    for kind, tree in (("job", job), ("cluster", cluster)):
        text = json.dumps(tree, ensure_ascii=True)
        try:
            parse_text(kind, text, "f.yaml")  # type: ignore[call-overload]
        except DescriptionError as error:
            assert error.problems
            assert all(p.file == "f.yaml" and p.message for p in error.problems)


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="a:b-[]{}#&*!|>'\"%@`,?\n \t<\x00é", max_size=24), st.binary(max_size=12))
def test_any_text_is_read_or_refused(text: str, raw: bytes) -> None:
    for source in (text, raw):
        with pytest.raises(DescriptionError):
            parse_text("job", source, "f.yaml")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abnodes.=0123[]{}'\"~ \n", max_size=20))
def test_any_assignment_is_taken_or_refused(assignment: str) -> None:
    try:
        parse_text("job", JOB, "f.yaml", [assignment])
    except DescriptionError as error:
        assert error.problems


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{every: 5}", "3:14: 'every' does not go with program: the program decides that itself; foreign says where"),
        ("{}", "3:1: checkpoint of a program needs foreign"),
        ("{foreign: 'a/../*'}", "3:23: 'a/../*' is no pattern inside the run"),
        ("{foreign: '$ZERUN_RUN_DIR/checkpoints/*'}", "3:23: '$ZERUN_RUN_DIR/checkpoints/*' begins in the run's own folder"),
        ("{foreign: 'a/*', whole_when: a/b}", "3:42: 'a/b' is no file's name; accepted: DONE (inside)"),
        ("{whole_when: DONE}", "3:14: whole_when goes with foreign"),
    ],
)  # fmt: skip
def test_a_programs_own_checkpoints(section: str, says: str) -> None:
    told = mistakes("job", f"name: j\nprogram: {{argv: [x]}}\ncheckpoint: {section}\n")
    assert any(line.startswith(f"f.yaml:{says}") for line in told), told


@pytest.mark.parametrize(
    "text",
    [
        "name: c\nbackend: slurm\npaths: {runs: /r}\nnodes: {slots: 100000000}\n",
        "name: c\nbackend: slurm\npaths: {runs: /r}\npools: {a: {slots: 100000000}}\n",
        "name: c\nbackend: direct\npaths: {runs: /r}\nnodes: [{name: n, slots: 100000000}]\n",
    ],
)
def test_slots_that_no_machine_has_are_a_mistake(text: str) -> None:
    """Lists are made of slots: a plan with these would fill the memory before it could say anything."""
    (told,) = mistakes("cluster", text)
    assert "100000000 is out of range; accepted: from 1 to 65536" in told


def test_the_beginning_of_a_key_is_taken_for_the_key() -> None:
    with pytest.raises(DescriptionError, match=r"unknown key 'slots' \(did you mean 'slots_per_node'\?\)"):
        parse_text("job", JOB + "slots: 2\n", "j.yaml")


def test_a_model_of_ones_own_on_tensor_ranks_says_how_it_is_cut() -> None:
    own = JOB.replace("{kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}", "{factory: 'own:net'}")
    own = own.replace("python-stdlib}", "python-stdlib, options: {seq_len: 8}}")
    how = "a model of your own is cut by parallel.split: names of its layers to column, row or vocabulary"
    assert mistakes("job", own + "parallel: {tensor: 2}\n") == [f"f.yaml:8:20: {how}"]
    wrong = 'parallel: {tensor: 2, split: {"layers.*": column/0}}\n'
    accepted = "accepted: column, column/3, row, vocabulary"
    assert mistakes("job", own + wrong) == [f"f.yaml:8:30: layers.*: 'column/0' is not accepted; {accepted}"]
    known = JOB + 'parallel: {tensor: 2, split: {"blocks.*": row}}\n'
    said = "split goes with a model of your own; the reference model knows its cuts"
    assert mistakes("job", known) == [f"f.yaml:8:23: {said}"]
    assert parse_text("job", own + 'parallel: {tensor: 2, split: {"layers.*": column/3}}\n', "f.yaml")
