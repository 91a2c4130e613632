"""Plan one host of a job: modes/ makes the plan, and plan.py holds the plan. Pure."""
