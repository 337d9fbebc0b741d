-- One draw, fenced. It runs inside one transaction, and says the same to SQLite, PostgreSQL and MariaDB.
--
-- :job :occurrence :occurrence_ms :token   what soloist told the command
-- :seed :winners                           chosen by the command
--
-- The answer is three results: the fence as it is now, the draw of this occurrence, its winners. The caller was
-- refused if the fence is not its own token.

-- The fence comes first. This statement locks the row, so of several attempts one goes on at a time; and a stale
-- attempt, whose token is not above the newest, changes nothing here and therefore nothing below.
update fence set token = :token
 where job = :job
   and token < :token;

-- Only for the attempt that the fence names now. Once per occurrence, and once per token.
insert into draws (job, occurrence_ms, occurrence, token, seed, entrants)
select fence.job, :occurrence_ms, :occurrence, :token, :seed, (select count(*) from entrants)
  from fence
 where fence.job = :job
   and fence.token = :token
   and not exists (select 1 from draws where job = :job and (occurrence_ms = :occurrence_ms or token = :token));

-- The winners come first in the order of ((id * 48271 + seed) mod 67108859) to the power of five, mod 67108859. Five
-- has no factor in common with 67108858, so no two entrants share a place; no product exceeds 2^53. Chance is in the
-- seed, which comes from the kernel: who knows it can draw again and gets the same winners.
insert into winners (job, occurrence_ms, place, entrant, name)
select draws.job, draws.occurrence_ms, ranked.place, ranked.id, ranked.name
  from draws,
       (select id, name, row_number() over (order by x2 * x2 % 67108859 * x % 67108859, id) as place
          from (select id, name, x, x * x % 67108859 as x2
                  from (select id, name, (id * 48271 + :seed) % 67108859 as x from entrants) as spread
               ) as squared
       ) as ranked
 where draws.job = :job
   and draws.occurrence_ms = :occurrence_ms
   and draws.token = :token
   and ranked.place <= :winners
   and not exists (select 1 from winners where job = :job and occurrence_ms = :occurrence_ms);

select 'fence', token from fence where job = :job;
select 'draw', occurrence, token, seed, entrants from draws where job = :job and occurrence_ms = :occurrence_ms;
select 'winner', place, entrant, name from winners where job = :job and occurrence_ms = :occurrence_ms order by place;
