"""Where other libraries meet our layers; nothing here is imported unless that library is."""
