"""The command that lists models."""

from infalign.cli.output import open_console

MODELS_EPILOGUE = """\
Example:
  infalign models
The first column is what a recipe takes as `model`, of policy, reward, judge or
rank_model. A GGUF is converted once to a folder in the hub's cache. A folder
that transformers loads, and any id of the hub, serve as well.
"""


def models() -> None:
    """List the models that are on this machine, or one `pip install` away, with size and licence."""
    from rich.filesize import decimal

    from infalign.display import plain_table
    from infalign.models.available import available

    table = plain_table("model", "size", "licence", "where", breaking=[0, 3])
    for model in available():
        table.add_row(model.name, decimal(model.size), model.license, model.where)
    open_console().print(table)
