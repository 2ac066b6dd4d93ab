#!/bin/bash
#SBATCH --job-name=zerun-run-1
#SBATCH --partition=scavenger
#SBATCH --account=0123
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --mem=491520M
#SBATCH --gres=gpu:a100:4
#SBATCH --signal=USR2@120
#SBATCH --chdir=/home/ann/runs/stage3-1
#SBATCH --output=/home/ann/runs/stage3-1/attempts/1/logs/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --export=NONE
#SBATCH --requeue

# Attempt 1 of run run-1: on each of 2 nodes one Slurm task, the agent,
# starts 4 ranks, keeps their logs in the run folder and writes down how they ended.
set -u
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}"
agent_python=python3
runtime=/home/ann/runs/.blobs/0123abcd.zip
run_dir=/home/ann/runs/stage3-1

# What srun would take for options of its own: left over from a job that this one was submitted in, or,
# like SLURM_EXPORT_ENV, from --export=NONE, with which a step would find no environment at all.
unset SLURM_EXPORT_ENV SRUN_EXPORT_ENV SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_CORE \
  SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_THREADS_PER_CORE \
  SLURM_CORE_SPEC SLURM_HINT SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_GRES SLURM_GPUS \
  SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_CPU_BIND SLURM_MEM_BIND \
  SLURM_DISTRIBUTION SLURM_HOSTFILE SLURM_EXACT SLURM_EXCLUSIVE SLURM_OVERLAP SLURM_OVERCOMMIT SLURM_WHOLE \
  SLURM_KILL_BAD_EXIT SLURM_WAIT SLURM_LABELIO SLURM_MPI_TYPE SLURM_TIMELIMIT SLURM_CONSTRAINT SLURM_NETWORK \
  SLURM_STDINMODE SLURM_STDOUTMODE SLURM_STDERRMODE SLURM_TASK_PROLOG SLURM_TASK_EPILOG SLURM_WORKING_DIR

# Whoever makes the attempt's claim owns it: a script that starts again gets the next free number.
attempt=$("$agent_python" "$runtime" claim --run-dir "$run_dir" --attempt 1) || exit
case $attempt in
  '' | *[!0-9]*)
    printf 'zerun: claim answered %q, not the number of an attempt\n' "$attempt" >&2
    exit 1
    ;;
esac

# A trap waits for a command in the foreground, so srun runs beside the shell and signals pass at once.
step=
trap '[ -z "$step" ] || kill -s USR2 "$step" 2>/dev/null' USR2
trap : TERM
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 \
  --cpus-per-task=64 \
  --mem=491520M \
  --gres=gpu:a100:4 \
  --mpi=none --kill-on-bad-exit=0 --wait=0 --unbuffered --export=ALL \
  "$agent_python" "$runtime" agent --run-dir "$run_dir" --attempt "$attempt" </dev/null &
step=$!

wait "$step"
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
done
wait "$step" # the shell remembers how srun ended: the worst of its tasks
status=$?

# Slurm queues again what it had to kill, not what ended well in the time that it gave. So this asks for it itself.
if scontrol -o show job "$SLURM_JOB_ID" 2>/dev/null | grep -q ' PreemptTime=[0-9]'; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 120
fi
exit "$status"
