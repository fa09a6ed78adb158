"""The command as such: errors in one line, suggestions, help, plug-ins, output."""

from __future__ import annotations

import pytest

from hal.cli import COMMANDS

BAD = [
    # arguments, what the one line on stderr says
    ("explan", "did you mean 'explain'?"),
    ("known_badd", "did you mean 'known-bad'?"),
    ("explain --jsn", "unknown option '--jsn'; did you mean '--json'?"),
    ("explain --on x87", "unknown machine 'x87'; did you mean 'x86'?"),
    ("explain --on cpuu:x86-64", "unknown platform 'cpuu'; did you mean 'cpu'?"),
    ("explain --on cpu:x86-64-v9", "'x86-64-v9' is no CPU architecture"),
    ("explain --on cpu", "names no device; write cpu:ARCH"),
    ("explain --on nowhere.json", "the facts file nowhere.json cannot be read"),
    ("explain --on x86 --backend torch_spda", "did you mean 'torch_sdpa'?"),
    ("explain --on x86 --kernel sdpa.cpuu", "did you mean 'sdpa.cpu'?"),
    ("explain --on x86 --waive memory.mth", "did you mean 'memory.math'?"),
    ("explain --on x86 --fit pad_headdim", "did you mean 'pad_head_dim'?"),
    ("explain --on x86 --with trch==2.13", "unknown package 'trch'"),
    ("explain --on x86 --with torch", "is no NAME==VERSION"),
    ("explain --on x86 --with torch==new", "'new' is no PEP 440 version"),
    ("explain --on x86 --without torch", "unknown package 'torch'"),
    ("explain --on x86 --call hed_dim=64", "did you mean 'head_dim'?"),
    ("explain --on x86 --call head_dim", "is no key=value"),
    ("explain --on x86 --call dtype=bf17", "did you mean 'bf16'?"),
    ("explain --on x86 --call head_dim=-1", "allowed: a whole number from 1"),
    ("explain --on x86 --call kv_heads=5", "no multiple of kv_heads=5"),
    ("explain --on x86 --call mask=none,mask_shape=b11k", "contradicts"),
    ("explain --on x86 --call device=3", "device 3 was asked for"),
    ("explain extra", "unexpected extra argument"),
    ("matrix --platform cppu", "did you mean 'cpu'?"),
    ("matrix --format pdf", "'pdf' is not one of"),
    ("--ignore-plugin torch_spda presets", "did you mean 'torch_sdpa'?"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[a for a, _ in BAD])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(hal, arguments, said):
    ran = hal(*arguments.split())
    assert ran.code == 2
    assert ran.out == ""
    lines = [line for line in ran.err.splitlines() if not line.startswith("hal: warning")]
    assert len(lines) == 1
    assert lines[0].startswith("hal: ")
    assert said in lines[0]


def test_help_lists_every_command_without_importing_one(process):
    ran = process(
        code="import sys, hal.cli as c\ntry: c.main(['--help'])\nfinally: print([m for m in sys.modules if m.startswith('hal.cli.')])"
    )
    assert all(name in ran.out for name in COMMANDS)
    assert "hal.cli.explain" not in ran.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_takes_ignore_plugin(hal, name):
    ran = hal(name, "--help")
    assert ran.code == 0
    assert "--ignore-plugin" in ran.out


def test_dashes_and_underscores_are_one_in_names_of_commands_and_options(hal):
    assert hal("known_bad", "--json").out == hal("known-bad", "--json").out
    assert hal("presets", "--ignore_plugin", "torch_cudnn_sdpa").code == 0


def test_version(hal):
    import hal as package

    assert hal("--version").out == f"hal {package.__version__}\n"


def test_a_command_alone_shows_the_help(hal):
    ran = hal()
    assert ran.code == 0
    assert "Commands" in ran.out


@pytest.mark.parametrize(
    "place",
    [
        ("--ignore-plugin", "torch_cudnn_sdpa", "matrix", "--json"),
        ("matrix", "--json", "--ignore-plugin", "torch_cudnn_sdpa"),
    ],
)
def test_ignore_plugin_works_before_and_after_the_command(hal, place):
    assert "torch_cudnn_sdpa" in hal("matrix", "--json").json["summary"]
    assert "torch_cudnn_sdpa" not in hal(*place).json["summary"]


@pytest.mark.parametrize("command", ["explain --on x86", "matrix", "presets", "known-bad", "facts --on x86"])
def test_output_in_a_pipe_is_plain(process, command):
    ran = process(*command.split())
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert ran.out.isascii() or command == "known-bad"


@pytest.mark.parametrize("command", ["explain --on x86", "matrix", "presets"])
def test_no_color_is_honoured_on_a_terminal(process, command):
    coloured = process(*command.split(), FORCE_COLOR="1", TERM="xterm-256color")
    plain = process(*command.split(), FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert "\x1b[1;36m" in coloured.out or "\x1b[36m" in coloured.out or "\x1b[1m" in coloured.out
    assert not any(f"\x1b[{n}m" in plain.out or f";{n}m" in plain.out for n in range(30, 38))
