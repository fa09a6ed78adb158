#!/usr/bin/env bash
# One platform's suite: on its hardware (HAL_HARDWARE=1) with its own packages, else simulated and without torch.
set -euo pipefail
platform=$1
shift
if [ "${HAL_HARDWARE:-}" = 1 ]; then
    case $platform in
        mps) python -m pip install --quiet "torch>=2.8" -e ".[test]" ;;
        # The vendor's PyTorch is installed by its own instructions (platforms/$platform/README.md) and is kept.
        *) python -m pip install --quiet -e ".[$platform,test]" ;;
    esac
    python -m pytest -m "$platform" tests "$@"
else
    python -m pip install --quiet -e . "pytest>=8" "hypothesis>=6.100" "jsonschema>=4.20"
    python -m pytest -m "not slow and not $platform" "tests/platforms/test_$platform.py" "$@"
fi
