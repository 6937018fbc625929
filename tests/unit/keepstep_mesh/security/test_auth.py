"""Tokens: their roles, their sources, and the refusal to listen beyond this machine without one."""

from __future__ import annotations

import itertools

import pytest

from keepstep_mesh.errors import AuthError
from keepstep_mesh.security import tokens
from keepstep_mesh.security.tokens import (
    Access,
    ClientToken,
    ForbiddenError,
    Role,
    Tokens,
    check_bind,
    is_loopback,
    tokens_of_service,
    watched_tokens,
)

WORKER, SERVICE, ADMIN = "w" * 20, "s" * 20, "a" * 20
TOKENS = Tokens(WORKER, SERVICE, ADMIN)

ALLOWED = {
    Access.OPEN: {None, "wrong", WORKER, SERVICE, ADMIN},
    Access.READ: {WORKER, SERVICE, ADMIN},
    Access.WORKER: {WORKER, ADMIN},
    Access.SERVICE: {SERVICE, ADMIN},
    Access.ADMIN: {ADMIN},
}


@pytest.mark.parametrize(("access", "token"), list(itertools.product(Access, [None, "wrong", WORKER, SERVICE, ADMIN])))
def test_each_role_may_do_what_the_table_says_and_nothing_else(access, token) -> None:
    header = None if token is None else f"Bearer {token}"
    if token in ALLOWED[access]:
        TOKENS.check(header, access)
    elif token in (WORKER, SERVICE, ADMIN):
        with pytest.raises(ForbiddenError, match="may not do this; it takes"):
            TOKENS.check(header, access)
    else:
        with pytest.raises(AuthError, match="KEEPSTEP_TOKEN") as raised:
            TOKENS.check(header, access)
        assert not isinstance(raised.value, ForbiddenError)


def test_without_any_token_everybody_is_admin() -> None:
    assert Tokens().check(None, Access.ADMIN).role is Role.ADMIN
    assert not Tokens()


def test_a_role_whose_token_is_not_given_out_cannot_be_had() -> None:
    with pytest.raises(ForbiddenError, match="no admin token"):
        Tokens(worker=WORKER).check(f"Bearer {WORKER}", Access.ADMIN)


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", WORKER, f"Basic {WORKER}", "Bearer \ud800", "Bearer é"])
def test_a_header_that_is_no_bearer_token_is_refused(header) -> None:
    with pytest.raises(AuthError):
        TOKENS.check(header, Access.READ)


def test_the_scheme_is_case_insensitive_as_http_wants_it() -> None:
    assert TOKENS.check(f"bearer {WORKER}", Access.READ).role is Role.WORKER


def test_weak_or_shared_tokens_are_refused_with_advice() -> None:
    with pytest.raises(AuthError, match=r"secrets\.token_urlsafe"):
        Tokens(worker="short")
    with pytest.raises(AuthError, match="two roles have the same token"):
        Tokens(worker=WORKER, admin=WORKER)


def test_a_token_is_in_no_repr_and_no_error() -> None:
    assert WORKER not in repr(TOKENS)
    for header, access in ((f"Bearer {WORKER}", Access.ADMIN), ("Bearer wrong-but-long-enough", Access.READ)):
        with pytest.raises(AuthError) as raised:
            TOKENS.check(header, access)
        assert WORKER not in str(raised.value)
        assert "wrong-but-long" not in str(raised.value)


def test_the_environment_beats_the_token_file(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n\nworker = {WORKER}\nadmin={ADMIN}\n")
    assert tokens_of_service({}, file) == Tokens(worker=WORKER, admin=ADMIN)
    found = tokens_of_service({"KEEPSTEP_ADMIN_TOKEN": "b" * 20, "KEEPSTEP_SERVICE_TOKEN": ""}, file)
    assert found == Tokens(worker=WORKER, admin="b" * 20)
    assert tokens_of_service({}) == Tokens()


def test_a_token_file_that_cannot_be_used_says_which_line(tmp_path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(AuthError, match="No such file"):
        tokens_of_service({}, file)
    for line in (WORKER, "root = " + WORKER, "admin ="):
        file.write_text(f"worker = {WORKER}\n{line}\n")
        with pytest.raises(AuthError, match="line 2: write worker"):
            tokens_of_service({}, file)


def test_a_client_has_one_token_from_a_variable_or_a_file(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text(WORKER + "\n")
    assert ClientToken({}).shown is None
    assert ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)}).shown == WORKER
    assert ClientToken({"KEEPSTEP_TOKEN_FILE": str(file), "KEEPSTEP_TOKEN": ADMIN}).shown == ADMIN
    with pytest.raises(AuthError, match="KEEPSTEP_TOKEN_FILE"):
        ClientToken({"KEEPSTEP_TOKEN_FILE": str(tmp_path / "none")})


def test_a_role_may_have_several_tokens_with_names(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"worker = {WORKER}\nworker = {SERVICE}\nadmin alice = {ADMIN}\n admin  bob smith={'b' * 20}\n")
    tokens = tokens_of_service({}, file)
    assert [tokens.holder(f"Bearer {one}").role for one in (WORKER, SERVICE)] == [Role.WORKER] * 2
    assert [tokens.holder(f"Bearer {one}").name for one in (ADMIN, "b" * 20, WORKER)] == ["alice", "bob smith", ""]
    assert repr(tokens) == "Tokens(worker, admin)"
    assert ADMIN not in repr(tokens.all)
    file.write_text(f"worker = {WORKER}\nadmin alice = {WORKER}\n")
    with pytest.raises(AuthError, match="two roles have the same token"):
        tokens_of_service({}, file)


def test_a_token_file_without_any_token_does_not_open_the_door_to_all(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"worker = {WORKER}\n")
    watched = watched_tokens({}, file)
    for empty in ("", "# admin = none yet\n"):
        file.write_text(empty)
        with pytest.raises(AuthError, match="holds no token"):
            tokens_of_service({}, file)
        watched.refresh()
        assert watched.value == Tokens(worker=WORKER)


def shown_by(token: str) -> str:
    """The header that a peer with this token sends."""
    return ClientToken.of(token).peer_headers()["Authorization"]


def test_the_header_among_peers_is_neither_the_token_nor_accepted_by_a_service() -> None:
    # It travels in plain HTTP.
    header = shown_by(WORKER)
    assert WORKER not in header
    assert not ClientToken.of(WORKER).accepts_peer(f"Bearer {WORKER}")
    with pytest.raises(AuthError, match="the token is wrong"):
        TOKENS.check(header, Access.READ)


def test_a_client_shows_the_first_line_and_takes_every_line_from_its_peers(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{ADMIN}\n\n{WORKER}\n")
    token = ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)})
    assert token.shown == ADMIN
    assert [token.accepts_peer(shown_by(one)) for one in (ADMIN, WORKER, SERVICE)] == [True, True, False]
    file.write_text(f"{WORKER}\n")
    token.refresh()
    assert token.shown == WORKER
    assert not token.accepts_peer(shown_by(ADMIN))
    file.write_text("")
    token.refresh()
    assert token.shown == WORKER
    with pytest.raises(AuthError, match="is empty; it must hold the token"):
        ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)})


def test_a_client_looks_at_its_file_again_after_a_while(tmp_path, monkeypatch) -> None:
    file = tmp_path / "token"
    file.write_text(WORKER)
    token = ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)})
    file.write_text(ADMIN + ADMIN)
    assert token.shown == WORKER
    monkeypatch.setattr(tokens, "TOKEN_CHECK_SECONDS", 0.0)
    assert token.shown == ADMIN + ADMIN


def test_peers_without_a_token_take_everybody() -> None:
    assert ClientToken({}).accepts_peer("")
    assert not ClientToken.of(None)
    assert ClientToken.of(WORKER).shown == WORKER
    assert ClientToken.of(token := ClientToken.of(WORKER)) is token


def test_loopback_is_told_from_the_world() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "", "node7")))


def test_nobody_listens_to_the_world_without_a_token_or_an_explicit_word() -> None:
    with pytest.raises(AuthError, match="--insecure"):
        check_bind("0.0.0.0", Tokens(), insecure=False)
    check_bind("0.0.0.0", Tokens(), insecure=True)
    check_bind("0.0.0.0", TOKENS, insecure=False)
    check_bind("127.0.0.1", Tokens(), insecure=False)
