"""The address of a Python buffer for native code: of read-only ones too, without copying.

Owned here: holding a buffer (a mapping, a memoryview, bytes) in its place while native code reads it. Invariant: between creation
and `release` the memory neither moves nor goes. CPython's own buffer protocol, through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class HeldBuffer:
    """`address` and `bytes` are good until `release`. Raises BufferError for what is not one contiguous buffer."""

    def __init__(self, data: Any) -> None:
        self._buffer = _PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(self._buffer), 0)
        self.address, self.bytes = self._buffer.buf or 0, self._buffer.len
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))

    def __enter__(self) -> HeldBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
