#!/usr/bin/env bash
# One platform's suite: on its hardware (HAL_HARDWARE=1) with its own packages, else simulated and without torch.
set -euo pipefail
platform=$1
shift

install() { python -m pip install --quiet "$@"; }

# PyTorch of a kind (its name in torch.version) from PyTorch's own index, unless the Python that runs tox has one.
pytorch() {
    python -c "import sys, torch; sys.exit(not getattr(torch.version, '$1', None))" 2>/dev/null ||
        install torch --index-url "https://download.pytorch.org/whl/$2"
}

if [ "${HAL_HARDWARE:-}" = 1 ]; then
    case $platform in
        rocm) pytorch hip rocm7.2 ;;
        xpu) pytorch xpu xpu ;;
        musa)
            python -c "import torch_musa" ||
                { echo "no index has torch_musa: install it by platforms/musa/README.md, then run tox again" >&2; exit 1; }
            ;;
    esac
    install -e ".[$platform,test]"
    python -m pytest -m "$platform" tests/hardware tests/platforms "$@"
else
    install -e ".[test]"
    python -m pytest -m "not slow and not $platform" "tests/platforms/test_$platform.py" "$@"
fi
