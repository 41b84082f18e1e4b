"""The token of a store, which its own processes show each other, and sign with where they have several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from psstore.config import TOKEN_RECIPE, Credentials, read_tokens
from psstore.errors import BadArgument
from psstore.net.address import Address, TcpAddress, is_loopback
from psstore.net.token_files import TokenWatch
from psstore.net.user_token import UserToken
from psstore.server import keys
from psstore.server.settings import ServerSettings


class StoreToken:
    """One that the store was given, or one that is made for the programs of its user."""

    def __init__(self, settings: ServerSettings, tcp: TcpAddress | None) -> None:
        """Raises BadArgument for files that are not as they should be, and for a store that has to be given one."""
        self.own: bytes | None = None
        """Made for this store, which was given none."""
        self._settings = settings
        self._tcp = tcp
        self._user_token: UserToken | None = None
        TokenWatch(settings.token_sources(None))  # for what is wrong with them
        # Of two tokens the one that is being replaced: other hosts may not have the new one yet.
        self._signing = read_tokens(Path(settings.token_file))[-1] if settings.token_file else None
        if settings.token_file is None:
            self._check_needs_none()

    def make(self, addresses: Sequence[Address]) -> None:
        """Makes one where none was given, for whoever may read its file and connects to one of these. A unix socket
        needs none."""
        if self._settings.token_file is None and self._tcp is not None:
            self._user_token = UserToken(addresses)
            self.own = self._signing = self._user_token.secret

    def also_for(self, addresses: Sequence[Address]) -> None:
        """The store is found at these, too. Raises OSError."""
        if self._user_token is not None and addresses:
            self._user_token.also(addresses)

    @property
    def credentials(self) -> Credentials:
        """What the store's own processes connect to each other with."""
        return self._settings.credentials(self.own)

    def signing_key(self, addresses: Sequence[str], *, store: str) -> bytes:
        """What shards of several hosts sign with. `addresses`: all shards', in order; `store`: shard 0's id."""
        assert self._signing is not None, "checked at the start"
        return keys.signing_key(self._signing, addresses=addresses, store=store)

    def close(self) -> None:
        """Nobody finds the one that was made any more."""
        if self._user_token is not None:
            self._user_token.close()

    def _check_needs_none(self) -> None:
        """Raises BadArgument that says how to make one."""
        hosts, is_public = self._settings.hosts(), self._tcp is not None and not is_loopback(self._tcp.host)
        if hosts is not None and (is_public or len(hosts) > 1 or self._settings.standby_hosts()):
            raise BadArgument(
                "the shards and clients of several hosts need a token, the same one everywhere:\n"
                f"  {TOKEN_RECIPE} > token && chmod 600 token\n"
                "  export PSSTORE_TOKEN_FILE=$PWD/token"
            )
        if self._tcp is not None and is_public:
            raise BadArgument(
                f"host {self._tcp.host} can be reached from other machines, so clients need a token:\n"
                f"  {TOKEN_RECIPE} > token && chmod 600 token\n"
                f"  psstore-server --host {self._tcp.host} --token-file token"
            )
