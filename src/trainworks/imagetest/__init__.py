"""The checks of an image: ``run.run_checks`` asks the image, ``results.line`` tells a person."""
