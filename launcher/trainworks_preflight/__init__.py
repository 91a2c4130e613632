"""trainworks_preflight: checks a training job on a laptop or in CI, before you pay for a cluster.

It is not part of any image. It imports the launcher and uses its validation and its planning; the
launcher never imports it. ``inputs`` reads the command line's files -> ``distribution`` says what
the SageMaker SDK sends -> ``check`` makes the launcher's job and plans -> ``advice`` adds advice.
"""
