"""Starting and ending the processes of a run, and the control records that they exchange."""
