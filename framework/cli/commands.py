"""The built-in commands, registered through the hook that third parties use."""

from importlib.util import find_spec

from ..contracts.hookspecs import Register, hookimpl

#: Headings of ``crossdraft --help``, in order; those of other distributions follow.
HEADINGS = ("Measure", "Prove", "Decide", "Serve", "Extend")
_COMMANDS = {
    "Measure": {
        "run": ("run.command:RunRecipe", "run a recipe: measure every cell of its matrix and write a report"),
        "report": ("report:ReportCommand", "report finished runs: a page, tables, charts or all numbers"),
        "runs": ("runs:Runs", "list runs and their progress"),
        "compare": ("compare:Compare", "compare two runs pair by pair"),
    },
    "Prove": {
        "certify": ("certify:Certify", "check by exact enumeration that a pair preserves the target distribution")
    },
    "Decide": {"cost": ("cost.command:Cost", "measure the latency of forward passes and predict speed-ups")},
    "Extend": {
        "new": ("new:New", "create a plug-in package for a drafter, a verifier or prompts"),
        "list": ("list:command", "list drafters, verifiers, models, prompts, recipes, plug-ins and the environment"),
    },
}


@hookimpl
def crossdraft_register_commands(register: Register) -> None:
    for heading, commands in _COMMANDS.items():
        for name, (place, summary) in commands.items():
            reference = f"{__package__}.{place}"
            if name == "cost" and find_spec("crossdraft_advisor"):  # with the roofline model of other machines
                reference = "crossdraft_advisor.commands.cost:CostAnywhere"
            register(name, reference, summary, heading)
