"""The step engine: a step as a pipeline of microbatches. Begin with `runtime`."""
