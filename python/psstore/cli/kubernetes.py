"""`psstore kubernetes`: manifests for a store and its workers."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from psstore.cli.choices import Mode, fail
from psstore.exit_codes import EXIT_FAILED, EXIT_MISSING, EXIT_NO_PROGRAM

app = typer.Typer(help="A store and its workers on Kubernetes.", no_args_is_help=True)


@app.command()
def render(
    image: Annotated[str, typer.Option(help="With psstore[metrics] and the training script.", show_default=False)],
    shards: Annotated[int, typer.Option(min=1, help="Shards of the store: a pod each.")] = 1,
    standbys: Annotated[int, typer.Option(min=0, max=1, help="1: each shard has another pod, to lead if it dies.")] = 0,
    workers: Annotated[str, typer.Option(help="Worker pods; FEWEST:MOST where they may come and go.")] = "1",
    mode: Annotated[Mode, typer.Option(help="Consistency.")] = Mode.sync,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where every pod can write: the store goes back to it by itself."),
    ] = None,
    checkpoint_every: Annotated[str, typer.Option(help="So many decisions, as 500, or seconds, as 60s.")] = "300s",
    stay: Annotated[bool, typer.Option("--stay", help="The store serves on when the workers are done.")] = False,
    name: Annotated[str, typer.Option(help="Of the objects.")] = "store",
    token_secret: Annotated[str, typer.Option(help="Secret whose key `token` is the store's.")] = "psstore-token",
    worker_token_secret: Annotated[
        str, typer.Option(help="Secret whose key `token` is the workers', who may train with it and no more.")
    ] = "psstore-worker-token",
    tls_secret: Annotated[
        str | None,
        typer.Option(help="Secret with the store's certificate, for pss://: tls.crt, tls.key, ca.crt."),
    ] = None,
    tls_client_secret: Annotated[
        str | None, typer.Option(help="Secret with the workers' certificate: the store then asks for one.")
    ] = None,
    env_secret: Annotated[
        list[str] | None, typer.Option(help="Secret for environment variables, as storage's (may be given twice).")
    ] = None,
    shard_memory: Annotated[str, typer.Option(help="Of each shard's pod.")] = "8Gi",
    shard_cpu: Annotated[str, typer.Option(help="Of each shard's pod.")] = "2",
    worker_memory: Annotated[str, typer.Option(help="Of each worker's pod.")] = "8Gi",
    worker_cpu: Annotated[str, typer.Option(help="Of each worker's pod.")] = "4",
    gpus: Annotated[int, typer.Option(min=0, help="Of each worker's pod.")] = 0,
    grace_s: Annotated[int, typer.Option("--grace-s", min=1, help="For a checkpoint or a step before the end.")] = 120,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND [ARGS]", help="What a worker runs: -- python train.py", show_default=False),
    ] = None,
) -> None:
    """Print a StatefulSet of shards, with its Service and PodDisruptionBudget, and a JobSet of workers, with which the
    store ends, as YAML for kubectl apply -f -."""
    import msgspec

    from psstore.errors import PsstoreError
    from psstore.launch.kubernetes.manifests import manifests
    from psstore.launch.kubernetes.plan import KubernetesPlan

    plan = KubernetesPlan(
        image=image,
        command=command or (),
        shards=shards,
        standbys=standbys,
        workers=workers,
        mode=mode.value,
        name=name,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        stay=stay,
        token_secret=token_secret,
        worker_token_secret=worker_token_secret,
        tls_secret=tls_secret,
        tls_client_secret=tls_client_secret,
        env_secrets=tuple(env_secret or ()),
        shard_memory=shard_memory,
        shard_cpu=shard_cpu,
        worker_memory=worker_memory,
        worker_cpu=worker_cpu,
        gpus=gpus,
        grace_s=grace_s,
    )
    try:
        documents = [msgspec.yaml.encode(one).decode() for one in manifests(plan)]
    except PsstoreError as error:
        fail(error.message)
    except ImportError:
        fail("YAML needs PyYAML: pip install 'psstore[kubernetes]'", exit_code=EXIT_MISSING)
    typer.echo("---\n".join(documents), nl=False)


@app.command(context_settings={"allow_interspersed_args": False})
def worker(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND [ARGS]", help="The worker's program.")],
) -> None:
    """Run a worker's program as its container's first process: what `render` has pods of workers do. It is told of
    SIGTERM, and one that was does not end with 0: its rank goes to another pod."""
    from psstore.launch.kubernetes import first_process

    try:
        code = first_process.run(command)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}", exit_code=EXIT_NO_PROGRAM)
    raise typer.Exit(code)


@app.command()
def stop(
    stateful_set: Annotated[str, typer.Argument(help="The store's StatefulSet.", show_default=False)],
) -> None:
    """End a store, from a pod of its cluster: what `render` has run when the workers are done."""
    from psstore.errors import BadArgument, PsstoreError
    from psstore.launch.kubernetes.stopping import scale_to_zero

    try:
        found = scale_to_zero(stateful_set, os.environ)
    except BadArgument as error:
        fail(error.message, exit_code=EXIT_MISSING)
    except PsstoreError as error:
        fail(error.message, exit_code=EXIT_FAILED)
    typer.echo(f"{stateful_set} ends" if found else f"there is no {stateful_set} any more")
