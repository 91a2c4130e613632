"""What people see: results on stdout, messages and progress on stderr."""
