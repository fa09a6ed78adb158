"""How people write Intel GPU architectures: code names, device ids, SYCL targets, product names.

Device ids: Linux, include/drm/intel/pciids.h.
"""

from __future__ import annotations

import re
from typing import Any

DEVICE_IDS = {
    "pvc": {0x0B69, 0x0B6E, *range(0x0BD4, 0x0BDC), 0x0BE0, 0x0BE1, 0x0BE5},
    "acm": {*range(0x5690, 0x5698), *range(0x56A0, 0x56A7), *range(0x56B0, 0x56B4), *range(0x56BA, 0x56C3)},
    "mtl": {0x7D40, 0x7D45, 0x7D55, 0x7D60, 0x7DD5},
    "arl": {0x7D41, 0x7D51, 0x7D67, 0x7DD1, 0xB640},
    "lnl": {0x6420, 0x64A0, 0x64B0},
    "bmg": {0xE202, 0xE209, *range(0xE20B, 0xE20E), *range(0xE210, 0xE213), 0xE216, *range(0xE220, 0xE224)},
    "ptl": {*range(0xB080, 0xB088), 0xB08F, 0xB090, 0xB0A0, 0xB0B0},
}
OTHER = "other"  # an Intel GPU that is not listed here
ARCHS = frozenset({*DEVICE_IDS, OTHER})
FORMS = "pvc, acm, mtl, arl, lnl, bmg or ptl, a device id such as 0xe20b, or a product such as Arc B580 or Max 1550"

# Code names with their steppings and SYCL targets: acm-g10, bmg_g21, intel_gpu_pvc.
_CODE = re.compile(r"(?:intel_gpu_)?(pvc|acm|dg2|ats|mtl|arl|lnl|bmg|ptl)(?:[-_](?:g\d\d|m\d*|vg|[hsu]))*")
_SAME = {"dg2": "acm", "ats": "acm"}
_WORDS = {
    "ponte vecchio": "pvc",
    "alchemist": "acm",
    "meteor lake": "mtl",
    "arrow lake": "arl",
    "lunar lake": "lnl",
    "battlemage": "bmg",
    "panther lake": "ptl",
    "arc": "mtl",  # the driver calls Meteor Lake "Intel(R) Arc(TM) Graphics"
}
_PRODUCTS = (
    ("pvc", r"(?:data center )?(?:max )?(?:max)?1(?:100|450|550)c?"),
    ("acm", r"(?:data center )?flex (?:series )?1[47]0"),
    ("acm", r"(?:arc )?(?:pro )?a(?:3[1578]0|5[3578]0|7[357]0|30|40|50|60)m?"),
    ("bmg", r"(?:arc )?(?:pro )?b(?:5[78]0|50|60|65|70)"),
    ("ptl", r"(?:arc )?b3[79]0"),
    ("lnl", r"(?:arc )?1[34]0v"),
    ("arl", r"(?:arc )?1[34]0t"),
)


def parse(text: Any) -> str | None:
    """The code name, or None."""
    if isinstance(text, int) and not isinstance(text, bool):
        return of_device(text)
    t = str(text).strip().lower()
    if t == OTHER:
        return t
    m = re.fullmatch(r"(?:8086:|0x)?([0-9a-f]{3,4})", t)
    if m and (arch := of_device(int(m[1], 16))):
        return arch
    if m := _CODE.fullmatch(t):
        return _SAME.get(m[1], m[1])
    t = re.sub(r"\((?:r|tm)\)|®|™|\b(?:intel|graphics|gpu)\b", " ", t)
    t = " ".join(t.split())
    return _WORDS.get(t) or next((arch for arch, form in _PRODUCTS if re.fullmatch(form, t)), None)


def of_device(number: int) -> str | None:
    return next((arch for arch, ids in DEVICE_IDS.items() if number in ids), None)
