"""A stand-in for humanize: the GPT scripts name sizes of memory with it."""


def naturalsize(value, *_args, **_options):
    return f"{value} bytes"
