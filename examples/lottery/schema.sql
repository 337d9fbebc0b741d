-- The tables of the lottery, in words that SQLite, PostgreSQL and MariaDB all understand.

create table if not exists entrants (
    id   bigint primary key,
    name varchar(100) not null
);

-- The newest fencing token that a job has come with. It only grows.
create table if not exists fence (
    job   varchar(100) primary key,
    token bigint not null
);

-- One draw per occurrence. Entrants, token and seed are all it takes to draw again and compare.
create table if not exists draws (
    job           varchar(100) not null,
    occurrence_ms bigint       not null,
    occurrence    varchar(40)  not null,
    token         bigint       not null,
    seed          bigint       not null,
    entrants      bigint       not null,
    primary key (job, occurrence_ms),
    unique (job, token)
);

create table if not exists winners (
    job           varchar(100) not null,
    occurrence_ms bigint       not null,
    place         bigint       not null,
    entrant       bigint       not null,
    name          varchar(100) not null,
    primary key (job, occurrence_ms, place),
    unique (job, occurrence_ms, entrant)
);
