"""Where runs live and what they may write. A runtime gets a job and a link, and gives back one ending."""
