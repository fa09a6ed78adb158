"""Compiles the kernel for an architecture that need not be here, and reads from the machine code what it became.

Needs no GPU: Triton carries the assemblers.  It says nothing about speed, and runs nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .kernel import forward
from .tiles import ARCHS, DTYPES, Tile

FORMS = {  # what the launcher may ask for: (RAGGED, BIAS)
    "full": (False, False),  # every slot of every block is a key
    "ragged": (True, False),
    "bias": (True, True),
}
# What one matrix instruction multiplies (m, n, k), and how many warps share it.
_MATRIX = {
    "mma": (r"\bmma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", 1),
    "wgmma": (r"\bwgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", 4),
    "mfma": (r"\bv_mfma_f32_(\d+)x(\d+)x(\d+)", 1),
    "wmma": (r"\bv_wmma_f32_(\d+)x(\d+)x(\d+)", 1),
}
_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


class Case(NamedTuple):
    arch: str
    head_dim: int
    dtype: str
    tile: Tile
    form: str

    def __str__(self) -> str:
        return f"{self.arch}-{self.head_dim}-{_SHORT[self.dtype]}-{self.tile.q}x{self.tile.k}-{self.form}"


class Compiled(NamedTuple):
    case: Case
    matrix: int  # matrix instructions of the architecture's own kind
    foreign: int  # and of other kinds
    products: int  # multiplications in them: both products of one step, if none is done otherwise or twice
    registers: int  # of a thread
    spilled: int  # registers (AMD, vector and scalar) or bytes of stack (NVIDIA) that did not fit
    shared: int  # bytes of a program
    tensor_memory: int  # columns of a program

    @property
    def problems(self) -> list[str]:
        arch, tile = ARCHS[self.case.arch], self.case.tile
        needed = 2 * tile.q * tile.k * self.case.head_dim
        found = []
        # tcgen05's are counted in the copies too that overlapping steps makes of the loop's first round
        if self.products < needed or (self.products > needed and arch.matrix != "tcgen05"):
            found.append(f"{self.products} multiplications by {arch.matrix} instructions; one step has {needed}")
        if self.foreign:
            found.append(f"{self.foreign} matrix instructions of another kind than {arch.matrix}")
        if self.spilled:
            found.append(f"{self.spilled} spilled")
        if self.shared > arch.shared:
            found.append(f"{self.shared} bytes of shared memory; {self.case.arch} has {arch.shared}")
        if self.tensor_memory > 512:
            found.append(f"{self.tensor_memory} columns of tensor memory; there are 512")
        return found


def cases() -> Iterator[Case]:
    """Everything that the tile table claims."""
    for name, arch in ARCHS.items():
        for head_dim, tiles in arch.tiles.items():
            for dtype in DTYPES:
                for tile in tiles:
                    yield from (Case(name, head_dim, dtype, tile, form) for form in FORMS)


def compiled(case: Case) -> Compiled:
    arch, tile = ARCHS[case.arch], case.tile
    target = GPUTarget(arch.target, case.arch if arch.target == "hip" else int(case.arch.removeprefix("sm")), arch.warp)
    kernel: Any = triton.compile(_source(case), target=target, options=tile.options)
    text = kernel.asm["amdgcn" if arch.target == "hip" else "ptx"]
    if arch.matrix == "tcgen05":  # the shape stands in a register: 128 rows at most, all columns, 16 deep
        matrix = len(re.findall(r"\btcgen05\.mma\.", text))
        deep = case.head_dim // 16 + tile.k // 16  # the instructions of both products
        products = 2 * tile.q * tile.k * case.head_dim * matrix // deep
    else:
        pattern, warps = _MATRIX[arch.matrix]
        shapes = [tuple(map(int, shape)) for shape in re.findall(pattern, text)]
        matrix, products = len(shapes), sum(m * n * k for m, n, k in shapes) * tile.warps // warps
    every = r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma|v_mfma|v_wmma)"
    registers, spilled = _registers_amd(text) if arch.target == "hip" else _registers_nvidia(kernel.asm["cubin"])
    shared, columns = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0
    foreign = len(re.findall(every, text)) - matrix
    return Compiled(case, matrix, foreign, products, registers, spilled, shared, columns)


def _source(case: Case) -> ASTSource:
    """The kernel as the launcher would call it: aligned tensors, and the strides that such head_dims give."""
    ragged, bias = FORMS[case.form]
    pointer = {"bfloat16": "*bf16", "float16": "*fp16"}[case.dtype]
    types = dict.fromkeys(("Q", "K", "V", "Out"), pointer) | {"Lse": "*fp32", "Index": "*i32", "Counts": "*i32"}
    types |= {"Valid": "*i32" if ragged else "constexpr", "Bias": "*fp32" if bias else "constexpr"}
    types |= {"scale_log2": "fp32"}
    constants: dict[str, Any] = {
        "HEAD_DIM": case.head_dim, "D": case.head_dim, "BLOCK_Q": case.tile.q, "BLOCK_K": 2 * case.tile.k,
        "TILE_Q": case.tile.q, "TILE_K": case.tile.k, "RAGGED": ragged, "BIAS": bias, "UPCAST": False,
    }  # fmt: skip
    constants |= {name: None for name in ("Valid", "Bias") if types[name] == "constexpr"}  # absent
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in forward.arg_names}
    strides = {f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhs"}
    aligned = [name in strides or kind.startswith("*") for name, kind in signature.items()]
    attributes = {(i,): [["tt.divisibility", 16]] for i, yes in enumerate(aligned) if yes}
    return ASTSource(fn=forward, signature=signature, constexprs=constants, attrs=attributes)


def _registers_nvidia(cubin: bytes) -> tuple[int, int]:
    """What the assembler wrote into the binary.  The kernel has no stack of its own: all of it is spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _registers_amd(text: str) -> tuple[int, int]:
    """The metadata of the code object; scratch memory counts as spilled too."""
    used = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)\b", text)}
    return used["vgpr_count"], used["vgpr_spill_count"] + used["sgpr_spill_count"] + used["private_segment_fixed_size"]
