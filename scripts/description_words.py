"""What every key of a description accepts and means: the words of docs/descriptions.md."""

from __future__ import annotations

# ruff: noqa: E501  (a line a key reads better than a cut one)

HEAD = """# Descriptions

<!-- Written by scripts/gen_description_docs.py (`make docs`) from the models. Do not edit. -->

Every key is checked. A mistake is told as `file:line:column: what is wrong, what is accepted, did you mean`, and all of
them at once. A key that is not built yet is refused by name, never ignored. `--set a.b=value` overrides a key of the job,
`--set cluster.a.b=value` one of its cluster, and both go through the same checks; `zerun cluster show` prints a cluster as it
was understood.

Text stays text: `partition: NO`, `account: 0123` mean what they say. A key with the value null counts as not written.
"""

UNITS = """## Units

| kind | examples | |
|---|---|---|
| bytes | `32GB` `32GiB` `25MB` | 32·10⁹, 32·2³⁰, 25·10⁶ |
| rate | `800Gbps` `300GB/s` | bits and bytes a second; `800Gbps` is 10¹¹ bytes a second |
| duration | `90s` `30min` `2h` `1h30min` `1d` | a number without a unit is refused |
| Slurm time | `24:00:00` `1-12` `90:00` `30` | Slurm's own forms: H:M:S, D-H, M:S, minutes; and durations as above |
| FLOP/s | `312T` `15.7T` | 10¹² a second |
| node list | `node[01-04,7]` `a1,b[2-3]` | Slurm's syntax; order and zero padding are kept: rank 0 stands on the first named |
"""

_PROGRAM_VARIABLES = """| variable | |
|---|---|
| `ZERUN_RUN_DIR` | the run's folder on this node, the same at every attempt: keep checkpoints below it |
| `ZERUN_ATTEMPT` | 1, and one more with each resume |
| `ZERUN_RESUME_FROM` | at a resume, the folder of the checkpoint, if `ZeroEngine.save` wrote one to `$ZERUN_RUN_DIR/checkpoints` |
| `ZERUN_STOP_FILE` | a file that is there once the script ought to save and end |
| `ZERUN_NODE` | the node's name in the description |"""

SECTIONS: dict[str, tuple[str, str]] = {
    "Cluster": ("", ""),
    "Login": ("`login`", "How the Slurm login node is reached; left out where zerun runs on it."),
    "Slurm": ("`slurm`", "Options of sbatch. What the launcher owns (nodes, tasks, output, export, …) cannot be given."),
    "Nodes": ("`nodes`, as a mapping", "Under Slurm `names` may be left out: Slurm chooses."),
    "NodeEntry": ("`nodes`, as a list", "`backend: direct`, where nodes differ: one entry a node."),
    "Device": ("`device`", "What stands behind each slot."),
    "Pool": ("`pools`: each of them", "Kinds of nodes that one cluster has; a job names one (`pool: a100`), and a job that names none gets the first. What a pool leaves\nout comes from the pool that it is `like`, then from `slurm`. Beside `pools` there is no `nodes` and no `device`."),
    "Network": ("`network`", ""),
    "Paths": ("`paths`", ""),
    "Ssh": ("`ssh`", "User, port, key and jump host come from `~/.ssh/config`, or from `config` instead; what stands here goes before it."),
    "Job": ("", "Either `model … steps`, trained by our engine, or `program`."),
    "Code": ("`code`", "What is shipped: the job file's git root, with uncommitted and untracked-but-not-ignored files; outside git the job file's own folder."),
    "GptModel": ("`model`: the reference GPT", "Pre-norm, learned positions, tied embedding."),
    "FactoryModel": ("`model`: your own", "`factory(**options) -> nn.Module`, called on the meta device. A batch of token files is `(inputs, targets)`, each\n(micro, seq_len), targets one token further; of a data factory, its samples stacked by torch's `default_collate`."),
    "Data": ("`data`", "Exactly one of `text`, `tokens` and `factory`."),
    "Zero": ("`zero`", "The engine's page tells what each comes to: [zero.md](zero.md)."),
    "Units": ("`zero.unit`, as a mapping", "Exactly one key. What no rule names stays gathered from forward to backward, and so do tied weights."),
    "Parallel": ("`parallel`", ""),
    "Optimizer": ("`optimizer`", ""),
    "OptimizerGroup": ("`optimizer.groups`", "Parameters with settings of their own; the first group that matches a name wins, and a pattern that matches none is a mistake.\nA group's `lr` goes through the same warm-up and schedule: at every step all rates stand in proportion. Groups share no flat buffer, so a\nunit may be padded once a group."),
    "Batch": ("`batch`", "`global` and `micro` (accumulation follows), or `micro` and `accumulation`."),
    "Evaluate": ("`evaluate`", ""),
    "Checkpoint": ("`checkpoint`", ""),
    "Program": ("`program`", "Your own script, unchanged, once a slot, with torchrun's variables; instead of `model … steps`. It also gets\n\n" + _PROGRAM_VARIABLES),
}  # fmt: skip

_NAME = "a name: letters, digits, `.` `_` `-`"
_ENV = "mapping of text"

MEANINGS: dict[str, tuple[str, str]] = {
    "Cluster.name": (_NAME, "what runs and messages call it"),
    "Cluster.backend": ("`slurm` `direct`", "how jobs start; `ssh` is accepted for `direct`"),
    "Cluster.login": ("mapping", "the Slurm login node"),
    "Cluster.slurm": ("mapping", "partition, account, …"),
    "Cluster.nodes": ("mapping or list", "the nodes and their slots"),
    "Cluster.device": ("mapping", "what stands behind a slot"),
    "Cluster.pools": ("mapping of pools", "kinds of nodes, by the names that jobs call them; instead of `nodes` and `device`"),
    "Cluster.pool": ("a pool's name", "of a job that names none; left out: the first"),
    "Cluster.network": ("mapping", "how fast, which interface, which ports"),
    "Cluster.paths": ("mapping", "where runs live"),
    "Cluster.setup": ("bash text", "run on every node before the ranks, without `set -u`; its output is kept"),
    "Cluster.python": ("program", "starts the ranks; looked up after `setup`. Left out: `python3`, and on the laptop the Python that runs zerun"),
    "Cluster.agent_python": ("program", "starts the agent, before `setup`: any Python ≥ 3.9, no package needed"),
    "Cluster.env": (_ENV, "environment of every rank, after `setup`, before the job's"),
    "Cluster.ssh": ("mapping", "how nodes are reached"),
    "Login.host": ("host name or address", "or a name of your ssh configuration"),
    "Login.user": ("user name", "default: the ssh configuration's, then yours"),
    "Login.port": ("1 to 65535", ""),
    "Login.via": ("`fabric` `openssh`", "who logs in: the library, or the system's `ssh`, once by hand (`zerun login`), for second factors"),
    "Slurm.partition": ("word", "`--partition`"),
    "Slurm.account": ("word", "`--account`"),
    "Slurm.qos": ("word", "`--qos`"),
    "Slurm.constraint": ("word", "`--constraint`"),
    "Slurm.reservation": ("word", "`--reservation`"),
    "Slurm.exclusive": ("`true` `false`", "`--exclusive`: whole nodes"),
    "Slurm.gpus_by": ("`gres` `gpus-per-node` `none`", "how GPUs are asked for, one a slot"),
    "Slurm.gpu_type": ("word", "the type in `--gres=gpu:TYPE:N`"),
    "Slurm.extra": ("mapping", "any other long option of sbatch: `mail-type: END`; null for one without a value"),
    "Nodes.names": ("node list", "the nodes"),
    "Nodes.hostfile": ("path", "a file of lines `host slots=N`, beside the cluster's file; `backend: direct`"),
    "Nodes.slots": ("1 or more", "ranks that a node has room for; 1 when left out"),
    "Nodes.cpus_per_slot": ("1 or more", "asked for on sbatch and srun; also the ranks' OMP_NUM_THREADS"),
    "Nodes.memory_per_slot": ("bytes", "host memory asked for, on sbatch and srun"),
    "Nodes.time_max": ("Slurm time", "a job that asks for more is refused here"),
    "NodeEntry.name": ("host name", "what records and logs call it"),
    "NodeEntry.address": ("host name or address", "what to connect to; left out: the name"),
    "NodeEntry.ssh": ("host name or address", "what ssh alone connects to, where nodes reach each other by another network; left out: the name, or the address"),
    "NodeEntry.slots": ("1 or more", "ranks on this node"),
    "NodeEntry.devices": ("list of numbers", "which devices, one a slot"),
    "Device.kind": ("`cpu` `gpu`", ""),
    "Device.model": ("text", "as people call it"),
    "Device.memory": ("bytes", "of one device, as its driver says; left out: whether a plan fits cannot be said"),
    "Device.reserve": ("bytes", "what driver and libraries hold of it"),
    "Device.peak_flops": ("mapping of FLOP/s", "by precision: `{bf16: 312T}`"),
    "Device.precisions": ("list of `fp32` `bf16` `fp16`", "what it computes in; a job in another is refused. Left out: all are taken to work"),
    "Pool.like": ("a pool's name", "the pool from which comes what is left out here"),
    "Pool.partition": ("word", "`--partition`"),
    "Pool.account": ("word", "`--account`"),
    "Pool.qos": ("word", "`--qos`"),
    "Pool.constraint": ("word", "`--constraint`"),
    "Pool.reservation": ("word", "`--reservation`"),
    "Pool.exclusive": ("`true` `false`", "`--exclusive`: whole nodes"),
    "Pool.gpus_by": ("`gres` `gpus-per-node` `none`", "how GPUs are asked for, one a slot"),
    "Pool.gpu_type": ("word", "the type in `--gres=gpu:TYPE:N`"),
    "Pool.nodes": ("node list", "the nodes of the pool; under Slurm it may be left out: Slurm chooses"),
    "Pool.slots": ("1 or more", "ranks that a node has room for; 1 when left out"),
    "Pool.cpus_per_slot": ("1 or more", "asked for on sbatch and srun; also the ranks' OMP_NUM_THREADS"),
    "Pool.memory_per_slot": ("bytes", "host memory asked for, on sbatch and srun"),
    "Pool.time_max": ("Slurm time", "a job that asks for more is refused here"),
    "Pool.device": ("mapping", "what stands behind a slot: the keys of `device`"),
    "Pool.preemptible": ("`true` `false`", "Slurm may take the nodes away: a job there is requeued by itself, and goes on from its newest whole checkpoint"),
    "Network.inside": ("rate", "between slots of one node, a slot"),
    "Network.between": ("rate", "between nodes, a node and direction, shared by its slots"),
    "Network.interface": ("interface name", "what gloo and NCCL bind to, where a node has several"),
    "Network.ports": ("`20000-29999`", "ports that jobs may use, both ends included"),
    "Paths.runs": ("path", "the folder of runs on the cluster; `~` and `$NAME` are expanded there, all else is literal"),
    "Paths.node_local": ("path", "a folder of each node's own disk; `~` and `$NAME` are expanded by the agent inside the job, after `setup`: `$SLURM_TMPDIR`"),
    "Paths.shared": ("`true` `false`", "one filesystem under `runs` for all nodes. With Slurm it must be"),
    "Ssh.config": ("path", "an OpenSSH client configuration, beside the cluster's file; used by the control connections, ssh and rsync alike"),
    "Ssh.jump": ("`[user@]host[:port]`", "a gate before the nodes"),
    "Ssh.user": ("user name", ""),
    "Ssh.port": ("1 to 65535", ""),
    "Ssh.key": ("path", "a private key"),
    "Ssh.connections": ("1 or more", "logins at once; sshd refuses too many (`MaxStartups`)"),
    "Ssh.via": ("`fabric` `openssh`", "who logs in to the nodes of `backend: direct`, as `login.via` says it for Slurm"),
    "Job.name": (_NAME, "runs are named after it"),
    "Job.pool": ("a pool's name", "the kind of nodes, where the cluster has `pools`; left out: its first"),
    "Job.nodes": ("1 or more", "how many nodes"),
    "Job.slots_per_node": ("a number or `all`", "ranks a node"),
    "Job.time": ("Slurm time", "the job's limit; kept by Slurm, or by the agents' own clocks under `direct`"),
    "Job.code": ("mapping", "what is shipped"),
    "Job.model": ("mapping", "what is trained"),
    "Job.data": ("mapping", "what it is trained on"),
    "Job.zero": ("mapping", "what is partitioned"),
    "Job.parallel": ("mapping", "other kinds of parallelism"),
    "Job.precision": ("`fp32` `bf16` `fp16`", "other than `fp32` is planned, not built in the engine: refused when a job starts"),
    "Job.optimizer": ("mapping", ""),
    "Job.groups": ("`module:function`", "of a model of your own: `groups(model)` returns parameter groups, by name or in a list: `{\"params\" or \"match\": […], \"lr\": …, \"weight_decay\": …}`"),
    "Job.batch": ("mapping", "samples a step"),
    "Job.steps": ("1 or more", "optimizer steps"),
    "Job.seed": ("whole number", "of weights, samples and dropout"),
    "Job.evaluate": ("mapping", "held-out loss on the way and at the end; without it none is computed"),
    "Job.recompute": ("`none` `block` or a list of blocks", "whose activations are computed again in backward instead of stored"),
    "Job.activations": ("`whole` `partitioned` `host`", "where what recomputation stores waits: as it is, divided over the tensor ranks, or in host memory"),
    "Job.checkpoint": ("mapping", "when checkpoints are written; without it one at the end"),
    "Job.env": (_ENV, "environment of every rank, after the cluster's"),
    "Job.secrets": ("list of names", "variables of *your* environment, given to the ranks, written nowhere else"),
    "Job.program": ("mapping", "your own script"),
    "Job.cluster": ("name or path", "the default of `--cluster`"),
    "Code.root": ("path", "another root, relative to the job's file"),
    "Code.include": ("list of patterns", "shipped although git or `.zerunignore` ignores it; as `.gitignore` writes patterns, which `.zerunignore` beside the root does too"),
    "Code.exclude": ("list of patterns", "not shipped, whatever else was said"),
    "Code.limit": ("bytes", "a larger bundle is refused, naming its five largest files"),
    "GptModel.kind": ("`gpt`", ""),
    "GptModel.layers": ("1 or more", "blocks"),
    "GptModel.hidden": ("1 or more", "width; a multiple of `heads`"),
    "GptModel.heads": ("1 or more", ""),
    "GptModel.seq_len": ("1 or more", "tokens a sample"),
    "GptModel.vocab": ("2 or more", "256: a token is a byte"),
    "GptModel.dropout": ("0 to below 1", ""),
    "FactoryModel.factory": ("`module:function`", "in the shipped code, or installed on the cluster"),
    "FactoryModel.options": ("mapping", "its keyword arguments"),
    "FactoryModel.loss": ("`module:function`", "`loss(model, batch) -> scalar`; left out: `model(*batch)` or, of a mapping, `model(**batch)` returns a scalar, an output with `.loss` or one with `[\"loss\"]`"),
    "Data.text": ("`python-stdlib`", "a corpus that every machine has: the sources of Python's standard library, split by file"),
    "Data.tokens": ("path", "a token file of `zerun data prepare`; relative: in the shipped code, from its root; absolute: on the cluster"),
    "Data.heldout": ("path", "the same, for held-out loss; goes with `tokens`"),
    "Data.factory": ("`module:function`", "`data(split, start_sample, **options) -> iterator` of single samples of all ranks together, from `start_sample` on; `split` is `train` or `heldout`; one with `state_dict()` and `load_state_dict()` has its state saved and restored"),
    "Data.options": ("mapping", "the factory's keyword arguments; of token files for a model of your own: `seq_len`, `vocab`"),
    "Zero.stage": ("`0` `1` `2` `3`", "0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters"),
    "Zero.bucket": ("bytes", "size of a message"),
    "Zero.gradient_dtype": ("`fp32` `bf16` `fp16`", "of accumulated gradients; other than `fp32` is planned, not built in the engine: refused when a job starts"),
    "Zero.unit": ("`block`, or a mapping", "what stage 3 gathers together; left out: each block"),
    "Zero.reshard": ("`keep_last` `after_forward` `keep`", "stage 3 after forward: all units are released but the last one, which backward uses at once; all; or none"),
    "Zero.prefetch": ("0 to 64", "units that stage 3 gathers ahead of their use"),
    "Zero.replicas": ("1 or more, `nodes`", "partition inside each of so many groups of neighbouring ranks, and copy across them; `nodes`: a group a node"),
    "Zero.reduce_with": ("`ordered` `native`", "how gradients are summed: rank by rank, or at stage 0 by the library's own all-reduce"),
    "Units.class": ("a class name, or a list", "modules of these classes, the outermost ones"),
    "Units.names": ("a pattern, or a list", "modules whose names match (`layers.*.mlp`), the outermost ones"),
    "Units.size": ("bytes", "neighbouring modules up to so many bytes of parameters; larger blocks are divided"),
    "Parallel.tensor": ("1 or more", "tensor-parallel degree: so many neighbouring ranks hold the pieces of the same layers"),
    "Parallel.split": ("a map of name patterns to `column` `column/3` `row` `vocabulary`", "how the layers of a model of your own are cut; `column/3` for fused q, k and v"),
    "Optimizer.kind": ("`adamw` `sgd`", ""),
    "Optimizer.lr": ("above 0", "highest learning rate"),
    "Optimizer.weight_decay": ("0 or more", "AdamW: decoupled; SGD: added to the gradient"),
    "Optimizer.betas": ("two numbers", "of AdamW"),
    "Optimizer.eps": ("above 0", "of AdamW"),
    "Optimizer.momentum": ("0 to below 1", "of SGD; 0 keeps no state"),
    "Optimizer.nesterov": ("`true` `false`", "of SGD"),
    "Optimizer.clip": ("above 0", "global gradient norm; left out: no clipping"),
    "Optimizer.warmup": ("steps", "linear rise"),
    "Optimizer.schedule": ("`cosine` `constant`", "cosine falls to a tenth of `lr` at the last step"),
    "Optimizer.groups": ("list", "parameters with settings of their own: `[{match: [\"*.bias\", \"*norm*\"], weight_decay: 0}]`"),
    "OptimizerGroup.match": ("list of patterns", "of parameters' names as `named_parameters()` gives them; `*` stands for any characters, dots too"),
    "OptimizerGroup.lr": ("above 0", "highest learning rate; left out: the optimizer's"),
    "OptimizerGroup.weight_decay": ("0 or more", "left out: the optimizer's"),
    "Batch.global": ("samples", "a step, over all ranks; a resume on another number of ranks keeps it"),
    "Batch.micro": ("samples", "a rank at once"),
    "Batch.accumulation": ("1 or more", "micro-batches a step"),
    "Evaluate.every": ("steps", "the last step is always evaluated"),
    "Evaluate.tokens": ("tokens", "how much held-out text"),
    "Checkpoint.every": ("steps, or a duration", "`50` or `30min`"),
    "Checkpoint.keep": ("1 or more", "the newest that stay; left out: all"),
    "Program.argv": ("list", "`[python, train.py]`: an argument list, never a shell line"),
    "Program.stop_signal": ("signal name", "before the time limit; a script that saves and exits 75 then is `stopped`, and `zerun resume` starts the next attempt"),
    "Program.stop_grace": ("duration", "how long it has for that"),
}  # fmt: skip
