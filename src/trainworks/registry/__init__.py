"""Registries: the client, logins, Amazon ECR, push and promote."""
