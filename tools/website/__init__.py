"""The documentation as a site and as manual pages: what stands in this repository, and what follows from its facts."""
