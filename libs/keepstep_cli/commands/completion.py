"""``keepstep completion``: print the script that makes a shell complete commands and names."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, flags, jobs, and replica groups.

    For bash, put eval "$(keepstep completion bash)" into ~/.bashrc.

    For zsh, put eval "$(keepstep completion zsh)" into ~/.zshrc.

    For fish, put keepstep completion fish | source into ~/.config/fish/config.fish.
    """
    from click.shell_completion import get_completion_class

    completer = get_completion_class(shell)
    if completer is None:
        raise click.UsageError(f"click has no completion for {shell}")
    print(completer(context.find_root().command, {}, "keepstep", "_KEEPSTEP_COMPLETE").source())
