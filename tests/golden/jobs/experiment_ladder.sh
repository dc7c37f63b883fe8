#!/bin/bash

# Parameters
#SBATCH --chdir=/fsx/home
#SBATCH --exclusive
#SBATCH --job-name=ladder
#SBATCH --mem=0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/fsx/home/runs/ladder/submissions/1/%j.log
#SBATCH --requeue
#SBATCH --signal=B:USR2@300

# setup
trap '' USR2  # until hlat.jobs.attempt installs its handler

# command
export SUBMITIT_EXECUTOR=slurm
exec /opt/venv/bin/python /fsx/home/code.zip hlat.jobs.attempt /fsx/home/runs/ladder/submissions/1
