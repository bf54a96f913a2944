"""What both PostgreSQL backends stand on: private sessions with a deadline for everything."""
