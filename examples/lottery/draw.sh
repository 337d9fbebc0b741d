#!/bin/sh
# draw.sh [--winners N] [--seed N]: draw winners among the entrants, once per occurrence.
#
# soloist starts it and says, in the environment, for which planned instant and under which fencing token. The
# database compares that token with the newest it has seen (draw.sql), so an attempt that was frozen, declared
# dead and replaced cannot write when it thaws: the one thing that a lease alone cannot prevent.
#
# LOTTERY_DB says where the entrants are:
#   sqlite:PATH                              the default is sqlite:lottery.db, in the working directory
#   postgres://USER:PASSWORD@HOST/DATABASE   any connection URI of psql; the password nowhere else in it
#   mysql://USER:PASSWORD@HOST:PORT/DATABASE or mariadb://...; ?socket=PATH for a Unix socket
#   file:PATH                                a text file under a lock; the default where sqlite3 is not installed
# A password is percent-encoded (`@` is %40), and reaches the client in its environment: `ps` shows arguments to everybody.
#
# Exit codes: 0 drawn, or already drawn; 3 refused, a newer attempt has taken over; 64 usage; 1 anything else.
set -eu

say() { printf '%s\n' "$*"; }
fail() { code=$1; shift; printf 'draw.sh: %s\n' "$*" >&2; exit "$code"; }
number() { case $2 in '' | *[!0-9]*) fail 64 "$1 must be a whole number, not \`$2\`" ;; esac; }
need() { command -v "$1" >/dev/null 2>&1 || fail 1 "$LOTTERY_DB needs \`$1\`: apt-get install $2"; }

# The same seed draws the same winners from the same entrants, in every database and in awk: see draw.sql.
prime=67108859
winners=10 seed=
while [ $# -gt 0 ]; do
    case $1 in
        --winners) winners=${2-}; shift ;;
        --seed) seed=${2-}; number "$1" "$seed"; shift ;;
        *) fail 64 "unknown option \`$1\`; usage: draw.sh [--winners N] [--seed N]" ;;
    esac
    shift || fail 64 "an option lacks its value"
done
number --winners "$winners"
[ "$winners" -gt 0 ] || fail 64 "--winners must be at least 1"
[ -n "$seed" ] || seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
seed=$((seed % prime))

job=${SOLOIST_JOB-} occurrence=${SOLOIST_OCCURRENCE-} occurrence_ms=${SOLOIST_OCCURRENCE_MS-} token=${SOLOIST_FENCING_TOKEN-}
[ -n "$job$token" ] || fail 64 "this is a job's command: it needs the SOLOIST_* environment. Try: soloist trigger lottery-draw"
number SOLOIST_OCCURRENCE_MS "$occurrence_ms"
number SOLOIST_FENCING_TOKEN "$token"
# What goes into SQL text is checked to the letter. A program with a real client library binds parameters instead.
case $job in '' | *[!A-Za-z0-9._-]*) fail 64 "SOLOIST_JOB is not a job's name: \`$job\`" ;; esac
case $occurrence in '' | *[!0-9TZ:.-]*) fail 64 "SOLOIST_OCCURRENCE is not an instant: \`$occurrence\`" ;; esac

here=$(dirname "$0")
if [ -z "${LOTTERY_DB-}" ]; then
    # A draw that began in the text file stays there, also when sqlite3 is installed later: one fence, not two.
    if [ -e lottery.tsv ] || ! command -v sqlite3 >/dev/null 2>&1; then LOTTERY_DB=file:lottery.tsv
    else LOTTERY_DB=sqlite:lottery.db; fi
fi

# A thousand people, numbered from 1.
first='Ada Amara Anton Bao Beatriz Bjorn Carmen Chidi Dalia Dmitri Elif Emeka Farah Felix Grace Hana Hugo Ines Ivan Jamila
Jun Kai Keiko Lars Leila Luca Mei Miguel Nadia Noor Olga Omar Priya Quentin Rosa Samir Tala Uma Viktor Yara'
last='Almeida Becker Chen Diallo Eriksen Fischer Garcia Haddad Ivanova Jensen Kowalski Lindqvist Moreau Nakamura Okafor
Petrov Quispe Rossi Singh Tanaka Ueda Vargas Weber Yilmaz Zhang'
everybody() {
    printf '%s\n%s\n' "$(say $first)" "$(say $last)" | awk '
        NR == 1 { n = split($0, first) }
        NR == 2 { m = split($0, last); for (i = 1; i <= n * m; i++) print i "\t" first[(i - 1) % n + 1] " " last[int((i - 1) / n) + 1] }'
}

# The whole conversation with a database, as SQL text: $1 begins the set-up, $2 ends it, $3 begins the draw.
conversation() {
    say "$1"
    cat "$here/schema.sql"
    everybody | awk -F '\t' '
        NR == 1 { print "insert into entrants (id, name) with everybody (id, name) as (values" }
        { printf "%s(%s, %c%s%c)", NR == 1 ? "" : ",\n", $1, 39, $2, 39 }
        END { print ") select id, name from everybody where not exists (select 1 from entrants);" }'
    say "insert into fence (job, token) select '$job', 0 where not exists (select 1 from fence where job = '$job');"
    say "$2"
    say "$3"
    sed -e "s/:job/'$job'/g" -e "s/:occurrence_ms/$occurrence_ms/g" -e "s/:occurrence/'$occurrence'/g" \
        -e "s/:token/$token/g" -e "s/:seed/$seed/g" -e "s/:winners/$winners/g" "$here/draw.sql"
    say "commit;"
}

in_sqlite() {
    need sqlite3 sqlite3
    # `immediate`: take the write lock first, so that what is read cannot change before it is acted upon.
    conversation 'begin immediate;' 'commit;' 'begin immediate;' |
        sqlite3 -batch -bail -noheader -list -separator "$(printf '\t')" -cmd '.timeout 10000' "${LOTTERY_DB#sqlite:}"
}

# `p%40ss` is p@ss. The text goes through a pipe: it is no argument either.
decoded() {
    printf '%s' "$1" | LC_ALL=C awk '
        BEGIN { for (i = 1; i < 256; i++) c[sprintf("%02x", i)] = sprintf("%c", i) }
        {
            out = ""
            while (match($0, /%[0-9A-Fa-f][0-9A-Fa-f]/)) {
                out = out substr($0, 1, RSTART - 1) c[tolower(substr($0, RSTART + 1, 2))]
                $0 = substr($0, RSTART + 3)
            }
            printf "%s", out $0
        }'
}

in_postgres() {
    need psql postgresql-client
    rest=${LOTTERY_DB#*://}
    place=${rest%%[/?]*}
    rest=${rest#"$place"} user=''
    case $rest in *password=*) fail 64 "write the password into LOTTERY_DB as postgres://USER:PASSWORD@HOST/DATABASE" ;; esac
    case $place in *@*) user=${place%@*} place=${place##*@} ;; esac
    case $user in *:*)
        PGPASSWORD=$(decoded "${user#*:}")
        export PGPASSWORD
        user=${user%%:*} ;;
    esac
    # The advisory lock guards the set-up alone: `create table if not exists` may fail when two do it at once.
    conversation 'set client_min_messages = warning; begin; do $$ begin perform pg_advisory_xact_lock(7, 10); end $$;' 'commit;' 'begin;' |
        PGCONNECT_TIMEOUT=${PGCONNECT_TIMEOUT:-10} psql -X -q -A -t -F "$(printf '\t')" -v ON_ERROR_STOP=1 \
            -d "postgres://${user:+$user@}$place$rest"
}

in_mariadb() {
    need mariadb mariadb-client
    rest=${LOTTERY_DB#*://} query='' user='' password='' port=''
    case $rest in *\?*) query=${rest#*\?} rest=${rest%%\?*} ;; esac
    database=${rest#*/} rest=${rest%%/*}
    case $rest in *@*) user=${rest%@*} rest=${rest##*@} ;; esac
    case $user in *:*) password=${user#*:} user=${user%%:*} ;; esac
    case $rest in *:*) port=${rest#*:} rest=${rest%%:*} ;; esac
    set -- --no-defaults -N -B --connect-timeout=10 ${user:+--user="$user"} ${rest:+--host="$rest"} ${port:+--port="$port"}
    case $query in socket=*) set -- "$@" --socket="${query#socket=}" ;; esac
    [ -z "$password" ] || { MYSQL_PWD=$(decoded "$password") && export MYSQL_PWD; }
    # `create table` ends a transaction here, so the set-up is guarded by a named lock.
    conversation "set session transaction isolation level read committed; do get_lock('lottery-set-up', 10); begin;" \
        "commit; do release_lock('lottery-set-up');" 'begin;' | mariadb "$@" "$database"
}

# The same rules without a database: one text file, changed by one process at a time and replaced as a whole.
in_file() {
    need flock util-linux
    file=${LOTTERY_DB#file:}
    exec 9>>"$file.lock"
    flock 9
    [ -e "$file" ] || { everybody | sed 's/^/entrant\t/' >"$file.new" && mv "$file.new" "$file"; }
    awk -F '\t' -v OFS='\t' -v job="$job" -v at="$occurrence_ms" -v instant="$occurrence" -v token="$token" -v seed="$seed" \
        -v winners="$winners" -v p="$prime" -v new="$file.new" '
        $1 == "entrant" { name[$2] = $3; entrants++ }
        $1 == "fence" && $2 == job { fence = $3; next }
        $1 == "draw" && $2 == job && $3 == at { drawn = $4 OFS $5 OFS $6 OFS $7 }
        $1 == "draw" && $2 == job && $5 == token { used = 1 }
        $1 == "winner" && $2 == job && $3 == at { place++; won[place] = $5; called[place] = $6 }
        { print > new }
        END {
            if (fence + 0 < token + 0) fence = token
            if (fence == token && drawn == "" && !used) {
                drawn = instant OFS token OFS seed OFS entrants
                print "draw", job, at, drawn > new
                for (id in name) { x = (id * 48271 + seed) % p; x2 = x * x % p; key[id] = x2 * x2 % p * x % p }
                for (place = 1; place <= winners && place <= entrants; place++) {
                    best = ""
                    for (id in key) if (best == "" || key[id] < key[best] || key[id] == key[best] && id + 0 < best + 0) best = id
                    won[place] = best; called[place] = name[best]; delete key[best]
                    print "winner", job, at, place, best, name[best] > new
                }
                place--
            }
            print "fence", job, fence > new
            if (close(new)) exit 1
            print "fence", fence
            if (drawn != "") print "draw", drawn
            for (i = 1; i <= place; i++) print "winner", i, won[i], called[i]
        }' "$file" && mv "$file.new" "$file"
}

case $LOTTERY_DB in
    sqlite:?*) store=in_sqlite shown=$LOTTERY_DB ;;
    postgres://* | postgresql://*) store=in_postgres shown=PostgreSQL ;;
    mysql://*/?* | mariadb://*/?*) store=in_mariadb shown=MariaDB ;;
    file:?*) store=in_file shown="$LOTTERY_DB" ;;
    *) fail 64 "LOTTERY_DB must be sqlite:PATH, postgres://..., mysql://.../DATABASE or file:PATH, not \`${LOTTERY_DB%%:*}:...\`" ;;
esac
answer=$($store) || fail 1 "nothing was drawn: $shown gave an error"

# What the database says now is what counts, not what we asked for.
fence=$(say "$answer" | awk -F '\t' '$1 == "fence" { print $2 }')
draw=$(say "$answer" | awk -F '\t' '$1 == "draw" { print $3 }')
[ -n "$fence" ] || fail 1 "nothing was drawn: $shown gave no answer"
[ "$fence" = "$token" ] ||
    fail 3 "refused: token $token is stale, $shown has seen token $fence: a newer attempt has taken over. Nothing was written"
[ -n "$draw" ] || fail 3 "refused: token $token was already used for another occurrence. Nothing was written"

[ "$draw" = "$token" ] || say "Already drawn, with token $draw: nothing was written."
say "$answer" | awk -F '\t' -v shown="$shown" '
    $1 == "draw" { at = $2; token = $3; seed = $4; entrants = $5 }
    $1 == "winner" { line[++n] = sprintf("  %2d.  %-20s no. %s", $2, $4, $3) }
    END {
        print "And the winners of " at " are, among " entrants " entrants:"
        for (i = 1; i <= n; i++) print line[i]
        print "Recorded in " shown ", fencing token " token ", seed " seed "."
    }'
