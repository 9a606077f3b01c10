#!/usr/bin/env bash
# Makes the virtual environment for the Makefile's targets. Usage: make_venv.sh FOLDER
#   PYTHON                the Python to make it from (default python3)
#   PERSISTENT_OPS_TORCH  what to install as torch on a machine without a GPU (default torch==2.13.0)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
python=${PYTHON:-python3}
torch=${PERSISTENT_OPS_TORCH:-torch==2.13.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\033[2m%s\033[0m\n' "$*" >&2; }
give_up() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

command -v "$python" >/dev/null || give_up "there is no '$python'; install Python 3.10 or newer, or name one: PYTHON=/path/to/python make ..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    give_up "$("$python" --version 2>&1) is too old; Python 3.10 or newer is needed. Name another one: PYTHON=/path/to/python make ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    give_up "$python cannot make virtual environments. On Debian and Ubuntu: apt-get install python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
has_cuda_torch() { "$python" -c 'import sys, torch; sys.exit(not (torch.version.cuda or "").startswith("13."))' 2>/dev/null; }

extras=dev
venv_options=()
if has_gpu; then
    extras=cuda13,dev
    if has_cuda_torch; then
        say "GPU found; $venv builds on the torch of $python"
        venv_options=(--system-site-packages)
    else
        say "GPU found; installing the CUDA build of torch into $venv (several GB)"
    fi
else
    say "no GPU found (nvidia-smi); setting up $venv with the CPU build of torch (once, about a minute)"
fi
"$python" -m venv "${venv_options[@]}" "$venv"
pip=("$venv/bin/python" -m pip install --quiet)

if ! has_gpu && ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # On PyPI the Linux wheel of torch is the CUDA build, several GB with what it needs. So look first for a wheel that
    # pip is configured to find on disk, then in torch's own index of CPU builds, and only then in the usual index.
    # What torch depends on is installed with the project below.
    "${pip[@]}" --no-deps --no-index "$torch" 2>/dev/null ||
        "${pip[@]}" --no-deps --retries 1 --timeout 15 --index-url https://download.pytorch.org/whl/cpu "$torch" 2>/dev/null ||
        { say "torch's index of CPU builds has no answer; taking $torch from pip's usual index" && "${pip[@]}" "$torch"; }
fi
"${pip[@]}" --editable ".[$extras]"

# FBGEMM and TorchRec, 8 MB with what they import: tests that have them beside the package are skipped without. FBGEMM's
# wheels are for one torch each, and for Linux on x86-64; TorchRec would bring its CUDA build, so nothing is resolved.
peers=(fbgemm-gpu-cpu==1.8.0 torchrec==1.6.1 tensordict==0.15.3 pyvers==0.2.3 pyre-extensions==0.0.32 typing-inspect==0.9.0)
has_torch_of_peers() { "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.__version__.startswith("2.13."))'; }
if ! has_gpu && has_torch_of_peers; then
    if ! { "${pip[@]}" --no-deps --only-binary :all: --retries 1 --timeout 15 "${peers[@]}" &&
        "$venv/bin/python" -W ignore -c 'import torchrec.distributed'; } 2>/dev/null; then
        say "FBGEMM and TorchRec cannot be had for this Python, or not from here; tests beside them will be skipped"
        "$venv/bin/python" -m pip uninstall --quiet --yes "${peers[@]%%==*}" 2>/dev/null || true
    fi
fi
# Triton's interpreter needs an older numpy, which PEs that it runs find by PYTHONPATH.
"${pip[@]}" --no-deps --upgrade --target "$venv/interpreter" "numpy<2.4"
say "$venv is ready"
