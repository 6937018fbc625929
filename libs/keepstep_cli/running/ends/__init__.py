"""Tell the lighthouse how groups ended: exit codes, last lines of output, kills because memory ran out, XID errors."""
