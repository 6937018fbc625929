"""The environment of a rank. Tokens and certificates are files, which it can read again, and no secret."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep_cli.running.embedded import lighthouse_program
from keepstep_cli.running.ranks import JobSpec, rank_environment
from keepstep_mesh.security.tls import TlsFiles


def job(token_file: Path | None = None, tls: TlsFiles | None = None) -> JobSpec:
    return JobSpec(
        command=("true",),
        replicas=1,
        nproc_per_replica=1,
        lighthouse="https://l:1",
        job="job",
        run_id="run",
        max_restarts=0,
        token_file=token_file,
        tls=tls or TlsFiles(),
    )


def environment(base: dict[str, str], token_file: Path | None = None, tls: TlsFiles | None = None) -> dict[str, str]:
    return rank_environment(job(token_file, tls), 0, 0, restart=0, master_port=1, base=base)


def secure(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(("KEEPSTEP_TOKEN", "KEEPSTEP_TLS"))}


def test_a_token_of_the_environment_is_handed_on() -> None:
    for base in ({"KEEPSTEP_TOKEN": "t"}, {"KEEPSTEP_TOKEN_FILE": "f", "KEEPSTEP_TLS_CA": "ca"}, {}):
        assert secure(environment(base)) == base


def test_the_flag_beats_the_environment_and_hands_on_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    base = {"KEEPSTEP_TOKEN": "t", "KEEPSTEP_TOKEN_FILE": "f", "KEEPSTEP_TLS_CA": "other"}
    told = environment(base, Path("token"), TlsFiles(Path("c.pem"), Path("c.key"), Path("ca.pem")))
    assert secure(told) == {
        "KEEPSTEP_TOKEN_FILE": str(tmp_path / "token"),
        "KEEPSTEP_TLS_CERT": str(tmp_path / "c.pem"),
        "KEEPSTEP_TLS_KEY": str(tmp_path / "c.key"),
        "KEEPSTEP_TLS_CA": str(tmp_path / "ca.pem"),
    }


def test_output_of_python_is_shown_at_once_unless_the_environment_says_otherwise() -> None:
    assert environment({})["PYTHONUNBUFFERED"] == "1"
    assert environment({"PYTHONUNBUFFERED": ""})["PYTHONUNBUFFERED"] == ""


def test_a_launcher_around_this_one_is_not_told_names() -> None:
    assert "KEEPSTEP_NAME_FILE" not in environment({"KEEPSTEP_NAME_FILE": "/of/another"})


def test_a_lighthouse_of_the_jobs_own_speaks_plain_http_on_loopback(tmp_path: Path) -> None:
    base = {"KEEPSTEP_LIGHTHOUSE_TLS_CERT": "l.pem", "KEEPSTEP_WORKER_TOKEN": "w" * 20}
    (told,) = lighthouse_program(1, tmp_path, base).environments(0)
    assert told == {"KEEPSTEP_WORKER_TOKEN": "w" * 20}


def test_a_group_of_several_machines_has_the_ranks_of_all_of_them_and_one_store() -> None:
    spec = replace(job(), nproc_per_replica=8, nnodes=3, node_rank=2, master=("m0", 29500))
    found = rank_environment(spec, 0, 5, restart=0, master_port=1, base={})
    expected = {
        "RANK": "21",
        "WORLD_SIZE": "24",
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "MASTER_ADDR": "m0",
        "MASTER_PORT": "29500",
    }
    assert expected.items() <= found.items()
