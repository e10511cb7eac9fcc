"""Control of a running job: requests, their delivery, and how they are applied."""
