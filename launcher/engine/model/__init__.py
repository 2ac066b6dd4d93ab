"""From a module to flat units: what forms one, whose settings it has, how it is built, its storages on one rank."""
