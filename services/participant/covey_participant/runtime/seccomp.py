"""Takes system calls away from a worker process for good: network, programs, processes, others' memory.

A list of what is denied, not of what is allowed: WebAssembly is the wall, and an interpreter's needs differ
from one C library to the next. Denied calls fail with EPERM.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Collection

_PR_SET_SECCOMP = 22
_MODE_FILTER = 2

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# Numbers on x86_64 and aarch64; None: it doesn't exist there.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # programs and processes
    "execve": (59, 221),
    "execveat": (322, 281),
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # the kernel itself
    "mount": (165, 40),
    "umount2": (166, 39),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # a way around all of the above
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def build_filter(machine: str, allowed: Collection[str] = ()) -> bytes | None:
    """Returns the filter as classic BPF; None on a machine whose numbers aren't known here.

    Args:
        allowed: names of `DENIED` that this worker can't do without.
    """
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        return None
    column = list(_ARCHITECTURES).index(machine)
    numbers = [
        pair[column] for name, pair in DENIED.items() if pair[column] is not None and name not in allowed
    ]
    code = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine == "x86_64":
        # The x32 twins of all calls have other numbers; nothing here uses them.
        code += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    for index, number in enumerate(numbers):
        code.append((_JUMP_EQUAL, len(numbers) - index, 0, number or 0))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)


def deny_system_calls(allowed: Collection[str] = ()) -> bool:
    """Installs the filter; needs PR_SET_NO_NEW_PRIVS. Returns whether machine and kernel have such a thing.

    Args:
        allowed: names of `DENIED` that this worker can't do without.

    Raises:
        OSError: the kernel has it and refused.
    """
    content = build_filter(platform.machine(), allowed) if sys.platform == "linux" else None
    if content is None:
        return False
    buffer = ctypes.create_string_buffer(content, len(content))
    program = _Program(len(content) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):  # a kernel built without it
        return False
    raise OSError(number, f"seccomp: {os.strerror(number)}")
