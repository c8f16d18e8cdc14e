"""The real admission controller in virtual time: policies against workloads, and recorded runs under other settings."""
