"""trainworks_preflight: check a training job on a laptop or in CI, before you pay for a cluster.

No image contains this package. It imports the launcher and uses its validation and its planning;
the launcher never imports it. ``inputs`` reads the command line's files, ``distribution``
translates to the hyperparameters that the SageMaker SDK sends, ``script`` finds imports, ``check``
makes the launcher's job and plans, ``advice`` and ``tips`` add advice, and ``report`` writes all.
"""
