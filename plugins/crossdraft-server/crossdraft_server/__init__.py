"""An OpenAI-compatible server for evaluation, as the command ``crossdraft serve``."""

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_commands(register):
    summary = "start an OpenAI-compatible server with a drafter and a verifier, for evaluation"
    register("serve", f"{__name__}.command:Serve", summary, heading="Serve")
